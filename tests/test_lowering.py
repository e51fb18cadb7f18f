"""What the program for a GPU says. No GPU is needed to make it."""

import functools
import logging
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mla
from jax_mla import primitive, runtime, variants
from jax_mla.testing import bytes_of, make_inputs

E4M3, BF16 = jnp.float8_e4m3fn, jnp.bfloat16

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="lowering looks at the GPUs of the process"
)


def avals(batch: int, heads: int, columns: int = 2112, pages: int = 8) -> dict[str, Any]:
    return {
        "qkv": jax.ShapeDtypeStruct((batch, columns), BF16),
        "q_norm": jax.ShapeDtypeStruct((1536,), BF16),
        "kv_norm": jax.ShapeDtypeStruct((512,), BF16),
        "w_qb": jax.ShapeDtypeStruct((heads * 192, 1536), BF16),
        "w_uk": jax.ShapeDtypeStruct((heads, 128, 512), BF16),
        "cache": jax.ShapeDtypeStruct((pages, 480, 576), E4M3),
        "slots": jax.ShapeDtypeStruct((batch,), jnp.int32),
    }


def lowered(
    operands: dict[str, Any], *, platforms: tuple[str, ...] = ("cuda",), **options: Any
) -> str:
    step = jax.jit(functools.partial(jax_mla.q_absorb, **options), donate_argnames="cache")
    traced = step.trace(**operands)
    return str(traced.lower(lowering_platforms=platforms).as_text())


def call_in(text: str) -> str:
    calls = [line for line in text.splitlines() if "stablehlo.custom_call" in line]
    assert len(calls) == 1, text
    return calls[0]


def attributes_of(call: str) -> dict[str, str]:
    found = re.search(r"mhlo\.backend_config = \{(.*?)\}", call)
    assert found is not None, call
    return dict(pair.split(" = ") for pair in found[1].split(", "))


def test_the_call_has_its_target_operands_and_alias() -> None:
    call = call_in(lowered(avals(3, 2)))
    assert "stablehlo.custom_call @jax_mla_q_absorb(" in call
    assert "operand_index = 5" in call
    assert "output_tuple_indices = [1]" in call
    cache = "tensor<8x480x576xf8E4M3FN>"
    assert call.endswith(
        "(tensor<3x2112xbf16>, tensor<1536xbf16>, tensor<512xbf16>, tensor<384x1536xbf16>,"
        f" tensor<2x128x512xbf16>, {cache}, tensor<3xi32>, tensor<f32>, tensor<f32>)"
        f" -> (tensor<3x2x576xf8E4M3FN>, {cache})"
    )


def test_attributes_are_a_key_and_plain_numbers() -> None:
    assert attributes_of(call_in(lowered(avals(3, 2), eps=0.25))) == {
        "abi": f"{variants.ABI} : i32",
        "eps": "2.500000e-01 : f32",
        "kernel": f'"{variants.choose(3, 2).key}"',
        "style": "0 : i32",
    }


def test_the_program_has_nothing_but_the_call() -> None:
    """Scales are two constants; there is no branch and no copy."""
    text = lowered(avals(3, 2))
    operations = re.findall(r"= \"?(stablehlo\.\w+)", text)
    assert sorted(operations) == ["stablehlo.constant"] * 2 + ["stablehlo.custom_call"]
    assert "tf.aliasing_output = 1" in text


@pytest.mark.parametrize("batch", [0, 1, 2, 9, 17, 33, 257, 4096])
@pytest.mark.parametrize("heads", [1, 6, 16, 128])
def test_every_call_names_a_shipped_kernel(batch: int, heads: int) -> None:
    key = attributes_of(call_in(lowered(avals(batch, heads))))["kernel"]
    assert key.strip('"') in {variant.key for variant in variants.PLAIN_VARIANTS}


@pytest.mark.parametrize("columns", [2120, 3648])
def test_wide_rows_of_16_byte_multiples_are_read_in_place(columns: int) -> None:
    text = lowered(avals(3, 2, columns))
    assert f"(tensor<3x{columns}xbf16>, " in call_in(text)
    assert "slice" not in text


def test_other_wide_rows_are_copied_first() -> None:
    text = lowered(avals(3, 2, 2113))
    assert "stablehlo.slice %arg" in text
    assert "(tensor<3x2112xbf16>, " in call_in(text)


def test_caches_beyond_32_bits_lower() -> None:
    assert "tensor<20000x480x576xf8E4M3FN>" in call_in(lowered(avals(3, 2, pages=20_000)))


def test_implementations_and_platforms() -> None:
    operands = avals(3, 2)
    assert "custom_call" not in lowered(operands, implementation="reference")
    assert "custom_call" not in lowered(operands, platforms=("cpu",))
    assert "@jax_mla_q_absorb" in lowered(operands, implementation="cuda")
    both = lowered(operands, platforms=("cpu", "cuda"))
    assert "@jax_mla_q_absorb" in both
    assert "dot_general" in both
    with pytest.raises(jax_mla.UnsupportedError, match="compiled for cpu and cuda"):
        lowered(operands, platforms=("cpu", "cuda"), implementation="cuda")


def on_mesh(size: int, kind: AxisType) -> dict[str, Any]:
    mesh = AbstractMesh((size,), ("tp",), axis_types=(kind,))
    spec = P("tp") if kind == AxisType.Auto else P()
    operands = avals(4, 2)
    operands |= {
        name: operands[name].update(sharding=NamedSharding(mesh, P())) for name in operands
    }
    heads = operands["w_uk"].update(sharding=NamedSharding(mesh, spec))
    return operands | {"w_uk": heads}


@pytest.mark.parametrize("implementation", ["auto", "cuda"])
def test_a_jit_over_several_devices_is_refused_outside_of_shard_map(implementation: str) -> None:
    """The compiler would gather the heads that Auto axes split, unasked, in every step."""
    several = on_mesh(2, AxisType.Auto)
    with pytest.raises(ValueError, match=r"over 2 devices.* inside jax\.shard_map"):
        lowered(several, implementation=implementation)
    assert "custom_call" not in lowered(several, platforms=("cpu",))


def test_a_mesh_that_splits_nothing_is_accepted() -> None:
    call_in(lowered(on_mesh(1, AxisType.Auto)))
    call_in(lowered(on_mesh(2, AxisType.Explicit)))


def test_shard_map_calls_the_kernel_on_what_each_device_holds() -> None:
    mesh = AbstractMesh((2,), ("tp",), axis_types=(AxisType.Auto,))
    specs = {name: P("tp") if name in ("w_qb", "w_uk") else P() for name in avals(4, 2)}
    call = jax.shard_map(
        lambda operands: jax_mla.q_absorb(**operands)[0],
        mesh=mesh,
        in_specs=(specs,),
        out_specs=P(None, "tp"),
    )
    text = jax.jit(call).trace(avals(4, 2)).lower(lowering_platforms=("cuda",)).as_text()
    assert "tensor<1x128x512xbf16>" in next(
        line for line in text.splitlines() if "@jax_mla_q_absorb" in line
    )


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """This process seems to have two CUDA devices."""
    devices = [SimpleNamespace(local_hardware_id=ordinal) for ordinal in (0, 1)]
    client = SimpleNamespace(local_devices=lambda: devices)
    monkeypatch.setattr(primitive, "backends", lambda: {"cuda": client})
    return devices


@pytest.mark.usefixtures("two_gpus")
def test_lowering_loads_the_kernel_on_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[tuple[str, int]] = []
    monkeypatch.setattr(runtime, "load", lambda key, ordinal: loaded.append((key, ordinal)))
    call_in(lowered(avals(3, 2)))
    key = variants.choose(3, 2).key
    assert loaded == [(key, 0), (key, 1)]


@pytest.mark.usefixtures("two_gpus")
def test_an_unsupported_gpu_falls_back_with_one_line_or_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(key: str, ordinal: int) -> None:
        raise jax_mla.UnsupportedError(f"device {ordinal} is too old")

    monkeypatch.setattr(runtime, "load", refuse)
    with caplog.at_level(logging.WARNING, "jax_mla"):
        assert "custom_call" not in lowered(avals(3, 2))
    assert [record.getMessage() for record in caplog.records] == [
        "q_absorb uses the reference instead of a kernel: device 0 is too old"
    ]
    with pytest.raises(jax_mla.UnsupportedError, match="device 0 is too old"):
        lowered(avals(3, 2), implementation="cuda")


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("implementation", ["auto", "cuda"])
def test_an_unusable_setup_is_no_reason_to_fall_back(
    monkeypatch: pytest.MonkeyPatch, implementation: str
) -> None:
    def fail(key: str, ordinal: int) -> None:
        raise jax_mla.SetupError("no driver")

    monkeypatch.setattr(runtime, "load", fail)
    with pytest.raises(jax_mla.SetupError, match="no driver"):
        lowered(avals(3, 2), implementation=implementation)


def test_an_exported_program_comes_back() -> None:
    step = jax.jit(jax_mla.q_absorb, donate_argnames="cache")
    exported = jax.export.export(
        step, platforms=("cpu", "cuda"), disabled_checks=jax_mla.export_checks()
    )(**avals(3, 2))
    loaded = jax.export.deserialize(exported.serialize())
    assert loaded.platforms == ("cpu", "cuda")
    inputs = make_inputs(3, 2, pages=8, page_size=480)
    expected = jax_mla.q_absorb(**inputs)
    again = jax.jit(loaded.call, donate_argnames="cache")
    compiled = again.lower(**inputs).compile().as_text() or ""
    assert "input_output_alias={ {1}: " in compiled
    for got, wanted in zip(again(**inputs), expected, strict=True):
        np.testing.assert_array_equal(bytes_of(got), bytes_of(wanted))


def test_a_program_exported_for_gpus_holds_the_key() -> None:
    exported = jax.export.export(
        jax.jit(jax_mla.q_absorb), platforms=["cuda"], disabled_checks=jax_mla.export_checks()
    )(**avals(3, 2))
    loaded = jax.export.deserialize(exported.serialize())
    assert f'"{variants.choose(3, 2).key}"' in call_in(loaded.mlir_module())


def test_exporting_needs_the_check_to_be_disabled() -> None:
    with pytest.raises(ValueError, match="jax_mla_q_absorb"):
        jax.export.export(jax.jit(jax_mla.q_absorb), platforms=["cuda"])(**avals(3, 2))
