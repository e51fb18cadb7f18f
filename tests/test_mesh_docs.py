"""What docs/mesh.md shows is what the package does."""

import math
import pathlib
import re

import jax
import numpy as np

from jax_mla import MeshAxes, dcp

TEXT = (pathlib.Path(__file__).parents[1] / "docs" / "mesh.md").read_text()
AXES = MeshAxes(batch="data", heads="tensor", dcp="dcp")


def shown(label: str) -> list[str]:
    """The cells of the picture's rows with this label, device by device."""
    rows = re.findall(rf"^ +{label} *│(.*)│(?: +\d+ KiB)?$", TEXT, re.MULTILINE)
    return [cell.strip() for row in rows for cell in row.split("│")]


def test_the_picture_shows_where_arrays_are() -> None:
    mesh = jax.make_mesh((2, 2, 2), ("data", "tensor", "dcp"), devices=jax.devices("cpu"))
    at = AXES.shardings(mesh)

    def held(unit: str, sharding: jax.NamedSharding, *shape: int) -> list[str]:
        places = sharding.devices_indices_map(shape)
        ranges = [places[device][len(shape) - 1].indices(shape[-1]) for device in mesh.devices.flat]
        return [f"{unit} {start}-{stop - 1}" for start, stop, _ in ranges]

    assert shown("w_qb, w_uk") == held("heads", at.w_uk, 16)
    assert shown("q") == held("heads", at.q, 4, 16)
    assert shown("qkv, q") == held("tokens", at.qkv, 4) == held("tokens", at.slots, 2, 4)
    assert shown("cache") == held("pages", at.cache, 32)
    owners = np.asarray(dcp.owner(np.arange(10), 2))
    positions = [" ".join(map(str, np.flatnonzero(owners == rank))) for rank in (0, 1)]
    assert shown("positions") == [f"{own} ..." for own in positions] * 4


def test_the_picture_shows_what_a_device_holds_in_bytes() -> None:
    mesh = jax.sharding.AbstractMesh((2, 2, 2), ("data", "tensor", "dcp"))
    at = AXES.shardings(mesh)

    def held(sharding: jax.NamedSharding, shape: tuple[int, ...], item_bytes: int) -> int:
        return math.prod(sharding.shard_shape(shape)) * item_bytes // 1024

    weights = held(at.w_qb, (16 * 192, 1536), 2) + held(at.w_uk, (16, 128, 512), 2)
    expected = weights, held(at.q, (4, 16, 576), 1), held(at.cache, (32, 64, 576), 1)
    assert re.findall(r"│ +(\d+) KiB$", TEXT, re.MULTILINE) == [str(kib) for kib in expected] * 2


def test_the_table_shows_where_positions_go() -> None:
    for interleave in (1, 2):
        slots = dcp.local_slots(np.array([[7, 5]] * 12), np.arange(12), 4, 2, interleave)
        for rank in (0, 1):
            [row] = re.findall(rf"^\| I = {interleave}, rank {rank} \|(.*)\|$", TEXT, re.MULTILINE)
            expected = [f"{s // 4}:{s % 4}" if s >= 0 else "" for s in slots[rank].tolist()]
            assert [cell.strip() for cell in row.split("|")] == expected
