"""What a call with a mailbox compiles to, and that one which cannot work is named before."""

import functools
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from fake_gpu import FakeDriver
from fake_setup import install
from jax.sharding import AxisType, Mesh
from meshes import AXES, SCALES, cpu_mesh, exact_inputs, mesh_slots, place

import jax_mla
from jax_mla import UnsupportedError
from jax_mla.dcp import mailbox as mailbox_module

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="lowering looks at the GPUs of the process"
)

SHAPE = (2, 2, 2)
BATCH, HEADS = 8, 2
"""What a device has of the tokens and heads of `meshes`."""


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets mailboxes be made for CPU devices."""
    install(monkeypatch, FakeDriver(8))
    monkeypatch.setattr(mailbox_module, "check_devices", lambda groups, process: None)


def mailbox_of(mesh: Mesh, **changes: Any) -> jax_mla.DcpMailbox:
    options: dict[str, Any] = {"axis": "dcp", "max_batch": BATCH, "heads": HEADS} | changes
    return jax_mla.DcpMailbox(mesh, **options)


def lowered(mesh: Mesh, platform: str = "cuda", **options: Any) -> str:
    """The text of a step, by platform."""
    given = place(exact_inputs() | {"slots": mesh_slots(*SHAPE[::2])}, AXES, mesh)
    step = functools.partial(jax_mla.q_absorb, **(SCALES | {"axes": AXES} | options))
    with jax.set_mesh(mesh):
        traced = jax.jit(step, donate_argnames="cache").trace(**given)
        return str(traced.lower(lowering_platforms=(platform,)).as_text())


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("q_dtype", [None, jnp.bfloat16], ids=str)
def test_queries_are_gathered_by_one_call_and_no_collective(kind: AxisType, q_dtype: Any) -> None:
    mesh = cpu_mesh(SHAPE, kind)
    cache = {} if q_dtype is None else {"q_scale": 1.0, "q_dtype": q_dtype}
    with mailbox_of(mesh, q_dtype=q_dtype or "float8_e4m3fn") as mailbox:
        text = lowered(mesh, mailbox=mailbox, **cache)
    calls = re.findall(r"custom_call @jax_mla_exchange\(.*", text)
    assert len(calls) == 1
    element = "f8E4M3FN" if q_dtype is None else "bf16"
    assert f"(tensor<{BATCH}x{HEADS}x576x{element}>) -> tensor<{BATCH}x4x576x{element}>" in calls[0]
    assert 'kernel = "exchange"' in calls[0]
    assert f"mailbox = {mailbox.number} : i32" in calls[0]
    assert "has_side_effect = true" in calls[0]
    assert "all_gather" not in text


@pytest.mark.parametrize(
    ("change", "call", "text"),
    [
        ({"max_batch": BATCH - 1}, {}, f"the {BATCH} tokens .*got max_batch = {BATCH - 1}"),
        ({"heads": HEADS + 1}, {}, rf"the {HEADS} heads .*got one of {HEADS + 1} heads"),
        ({"axis": "tp"}, {}, "of the dcp axis of the call, 'dcp', got one of axis 'tp'"),
        ({}, {"q_scale": 1.0, "q_dtype": jnp.bfloat16}, "bfloat16 queries, got one of float8"),
        ({}, {"axes": replace(AXES, dcp=None)}, "mailbox must come with the mesh axis"),
        ({}, {"axes": None}, "mailbox must come with the mesh axis"),
    ],
)  # fmt: skip
def test_a_call_that_does_not_fit_is_refused_while_tracing(
    change: dict[str, Any], call: dict[str, Any], text: str
) -> None:
    mesh = cpu_mesh(SHAPE)
    mailbox = mailbox_of(mesh, **change)
    with pytest.raises(ValueError, match=text):
        lowered(mesh, mailbox=mailbox, **call)


def test_another_order_of_devices_is_refused() -> None:
    """While tracing a mesh has no devices: the lowering sees them."""
    mesh = cpu_mesh(SHAPE)
    others = Mesh(mesh.devices[..., ::-1], mesh.axis_names)
    with pytest.raises(ValueError, match=r"mesh of the call, .*\[0, 1.*got .*\[1, 0"):
        lowered(mesh, mailbox=mailbox_of(others))


def test_a_closed_mailbox_is_refused() -> None:
    mesh = cpu_mesh(SHAPE)
    mailbox = mailbox_of(mesh)
    mailbox.close()
    with pytest.raises(ValueError, match=r"mailbox must be open.*Make a new one"):
        lowered(mesh, mailbox=mailbox)


def test_other_platforms_and_other_things_are_refused() -> None:
    mesh = cpu_mesh(SHAPE)
    with pytest.raises(UnsupportedError, match=r"compiled for cpu\. Use them, or leave mailbox"):
        lowered(mesh, "cpu", mailbox=mailbox_of(mesh))
    with pytest.raises(TypeError, match=r"mailbox must be a jax_mla\.DcpMailbox, got int"):
        lowered(mesh, mailbox=3)
