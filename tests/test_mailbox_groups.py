"""Which devices exchange queries, as which ranks, and what a mailbox of a given size serves."""

from typing import Any

import jax
import numpy as np
import pytest
from fake_setup import FakeDevice

from jax_mla.dcp.capacity import Capacity
from jax_mla.dcp.groups import Groups


def mesh_of(ids: Any, names: tuple[str, ...], per_process: int = 8) -> jax.sharding.Mesh:
    """A mesh of devices by their ids, of which each process owns so many."""
    devices = [FakeDevice(id, id // per_process, id % per_process) for id in np.ravel(ids).tolist()]
    return jax.sharding.Mesh(np.array(devices).reshape(np.shape(ids)), names)


def ids(devices: Any) -> list[Any]:
    return [device.id for device in devices]


@pytest.mark.parametrize(
    ("places", "names", "groups"),
    [
        ([[3, 1, 0, 2], [7, 6, 5, 4]], ("data", "dcp"), [[3, 1, 0, 2], [7, 6, 5, 4]]),
        ([[3, 1], [0, 2], [7, 6], [5, 4]], ("dcp", "data"), [[3, 0, 7, 5], [1, 2, 6, 4]]),
        ([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], ("data", "dcp", "tensor"),
         [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ([[5]], ("data", "dcp"), [[5]]),
    ],
)  # fmt: skip
def test_groups_follow_mesh_places(places: Any, names: Any, groups: Any) -> None:
    found = Groups(mesh_of(places, names), "dcp")
    assert [ids(group) for group in found.members] == groups
    for group in found.members:
        assert all(found.of(device) == group for device in group)


def test_processes_find_the_same_devices_in_the_same_order() -> None:
    """Process 2 shares no group with the others."""
    found = Groups(mesh_of([[3, 0], [1, 2], [5, 4]], ("data", "dcp"), per_process=2), "dcp")
    assert found.processes == (0, 1, 2)
    assert [found.partners(process) for process in found.processes] == [(1,), (0,), ()]
    assert ids(found.owned(1)) == [3, 2]
    assert ids(found.reached(0, 1)) == [0, 1]
    assert ids(found.reached(1, 0)) == [3, 2]
    assert ids(found.reached(2, 2)) == [5, 4]


MESH = mesh_of(np.arange(8).reshape(2, 4), ("data", "dcp"))
GOOD: dict[str, Any] = {
    "mesh": MESH, "axis": "dcp", "max_batch": 3, "heads": 5,
    "q_dtype": "float8_e4m3fn", "timeout": 1.5,
}  # fmt: skip


@pytest.mark.parametrize(("q_dtype", "row"), [("float8_e4m3fn", 576), ("bfloat16", 1152)])
def test_a_half_holds_the_queries_of_a_group(q_dtype: str, row: int) -> None:
    capacity = Capacity(**GOOD | {"q_dtype": np.dtype(q_dtype)})
    assert (capacity.q_dtype, capacity.ranks) == (q_dtype, 4)
    assert capacity.half_bytes % 256 == 0
    assert 0 <= capacity.half_bytes - 3 * 4 * 5 * row < 256


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"mesh": MESH.abstract_mesh}, TypeError, "mesh must be .*Mesh, got AbstractMesh.*make_m"),
        ({"axis": "model"}, ValueError, "axis must be one of .*'data', 'dcp', got 'model'"),
        ({"mesh": mesh_of(range(17), ("dcp",))}, ValueError, "at most 16 devices, got 'dcp' of 17"),
        ({"max_batch": 0}, ValueError, "max_batch must be 1 to 4096, got 0"),
        ({"max_batch": 4097}, ValueError, "max_batch must be 1 to 4096, got 4097"),
        ({"max_batch": True}, TypeError, "max_batch must be a Python int, got bool"),
        ({"heads": 129}, ValueError, "heads must be 1 to 128, got 129"),
        ({"heads": 2.0}, TypeError, "heads must be a Python int, got float"),
        ({"q_dtype": "float32"}, ValueError, "q_dtype must be .*e4m3fn or bfloat16, got float32"),
        ({"q_dtype": None}, ValueError, "q_dtype must be .*, got None"),
        ({"q_dtype": "narrow"}, TypeError, "q_dtype must be a dtype, got 'narrow'"),
        ({"timeout": 0}, ValueError, "timeout must be positive and at most 1e.09 s, got 0"),
        ({"timeout": float("nan")}, ValueError, "timeout must be positive .* got nan"),
        ({"timeout": float("inf")}, ValueError, "timeout must be positive .* got inf"),
        ({"timeout": "1"}, TypeError, "timeout must be a Python float, got str"),
    ],
)
def test_arguments_that_cannot_be_used_are_named(
    change: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        Capacity(**GOOD | change)


CALL: dict[str, Any] = {
    "mesh": MESH, "axis": "dcp", "batch": 3, "heads": 5, "q_dtype": "float8_e4m3fn"
}  # fmt: skip
MANUAL = jax.sharding.Mesh(
    MESH.devices, MESH.axis_names, axis_types=(jax.sharding.AxisType.Explicit,) * 2
)


@pytest.mark.parametrize(
    "change", [{}, {"batch": 0}, {"mesh": MESH.abstract_mesh}, {"mesh": MANUAL.abstract_mesh}]
)
def test_calls_that_fit_are_served(change: dict[str, Any]) -> None:
    Capacity(**GOOD).require(**CALL | change)
    Capacity(**GOOD | {"q_dtype": "bfloat16"}).require(**CALL | change)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"axis": "data"}, "'data', got one of axis 'dcp'"),
        ({"axis": None}, "None, got one of axis 'dcp'"),
        ({"mesh": mesh_of(np.arange(8).reshape(2, 4)[:, ::-1], ("data", "dcp"))},
         r"2 'data' x 4 'dcp' with devices \[3, 2.*got .* \[0, 1"),
        ({"mesh": mesh_of(np.arange(8).reshape(4, 2), ("data", "dcp")).abstract_mesh},
         "4 'data' x 2 'dcp', got one of a mesh of 2 'data' x 4 'dcp'"),
        ({"batch": 4}, "the 4 tokens .*max_batch = 3"),
        ({"heads": 4}, "the 4 heads .* 5 heads.*heads=4"),
        ({"q_dtype": "bfloat16"}, "bfloat16 queries, got one of float8_e4m3fn"),
    ],
)  # fmt: skip
def test_a_call_that_does_not_fit_is_named(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Capacity(**GOOD).require(**CALL | change)
