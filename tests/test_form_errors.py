"""Wrong ropes, dtypes and mixtures are refused with a sentence; which kernel a form takes."""

import functools
import logging
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_mla
from jax_mla import primitive, runtime, variants
from jax_mla.formats import CACHE_FORMATS, STYLES, CacheFormat
from jax_mla.rules import form_of
from jax_mla.runtime.library import library
from jax_mla.testing import make_inputs

by_name = pytest.mark.parametrize("cache", CACHE_FORMATS, ids=lambda stored: stored.name)
BF16, E4M3 = jnp.bfloat16, jnp.float8_e4m3fn


def absorb(inputs: dict[str, Any], **options: Any) -> Any:
    return jax_mla.q_absorb(**inputs, **options)


WRONG = [
    ({"cos_sin": np.zeros((0, 64), np.float32)}, ("rope.cos_sin", "[1, 64]", "[0, 64]", "yarn")),
    ({"cos_sin": np.zeros((9, 32), np.float32)}, ("rope.cos_sin", "[9, 64]", "[9, 32]", "yarn")),
    ({"cos_sin": np.zeros(64, np.float32)}, ("rope.cos_sin", "[M, 64]", "[64]", "yarn")),
    ({"cos_sin": np.zeros((9, 64), BF16)}, ("rope.cos_sin", "float32", "bfloat16", "astype")),
    ({"cos_sin": None}, ("rope.cos_sin", "float32", "NoneType", "yarn")),
    ({"positions": None}, ("rope.positions", "int32", "NoneType", "rope.at")),
    ({"positions": np.zeros(5, np.int32)}, ("rope.positions", "[4]", "[5]", "rope.at")),
    ({"positions": np.zeros(4, np.uint32)}, ("rope.positions", "int32", "uint32", "astype")),
]


@pytest.mark.parametrize(("changes", "words"), WRONG)
def test_a_wrong_rope_is_refused_while_tracing(
    changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    inputs = make_inputs(4, 1, rope="half")
    inputs["rope"] = replace(inputs["rope"], **changes)
    with pytest.raises((TypeError, ValueError)) as caught:
        jax.eval_shape(absorb, inputs)
    message = str(caught.value)
    assert message.startswith(f"{words[0]} must "), message
    assert all(word in message for word in words), message


def test_a_rope_is_a_rope_of_a_known_style() -> None:
    inputs = make_inputs(4, 1, rope="half")
    with pytest.raises(TypeError, match=r"rope must be a jax_mla\.Rope, got tuple\..*Rope\.yarn"):
        absorb(inputs | {"rope": (inputs["rope"].cos_sin, inputs["rope"].positions)})
    with pytest.raises(ValueError, match="style must be one of interleaved, half, got 'neox'"):
        replace(inputs["rope"], style="neox")


@pytest.mark.parametrize(
    ("cache", "options", "message"),
    [
        ("bf16", {"q_dtype": E4M3}, "q_dtype must be bfloat16 with bf16 cache rows, got float8_e4"),
        ("fp8_ds_mla", {"q_dtype": E4M3}, "q_dtype must be bfloat16 with fp8_ds_mla cache rows"),
        ("e4m3", {"q_dtype": "float16"}, "q_dtype must be float8_e4m3fn or bfloat16 with e4m3"),
        (
            "bf16",
            {"q_scale": 0.5},
            "q_scale must be the Python number 1 with .* got 0.5",
        ),
        ("e4m3", {"q_dtype": BF16, "q_scale": 2}, "q_scale must be the Python number 1 with bf"),
        ("bf16", {"k_scale": 0.5}, "k_scale must be the Python number 1 with bf16 cache rows"),
        (
            "fp8_ds_mla",
            {"k_scale": jnp.float32(1)},
            "k_scale must be .* got ArrayImpl",
        ),
    ],
)
def test_mixtures_without_a_meaning_are_refused(
    cache: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        absorb(make_inputs(2, 1, cache=cache), **options)


def test_a_dtype_is_a_dtype() -> None:
    with pytest.raises(TypeError, match=r"q_dtype must be a dtype, got 'fp8'\. Pass jnp\.bf"):
        absorb(make_inputs(2, 1), q_dtype="fp8")


@pytest.mark.parametrize("shape", [(8, 656), (2, 4, 1, 656), (2, 4, 640)])
def test_a_uint8_cache_of_another_shape_is_told_the_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"cache must be \[P, S, 656\].*jnp\.uint8"):
        absorb(make_inputs(2, 1) | {"cache": jnp.zeros(shape, jnp.uint8)})


def test_options_of_another_type_are_refused() -> None:
    inputs = make_inputs(2, 1)
    with pytest.raises(
        TypeError, match=r"return_q_norm must be True or False, got .*Tracer.*stati"
    ):
        jax.jit(lambda flag: absorb(inputs, return_q_norm=flag))(True)
    with pytest.raises(TypeError, match=r"axes must be jax_mla\.MeshAxes, got str\. Name"):
        absorb(inputs, axes="data")
    with pytest.raises(TypeError, match=r"device must be a jax\.Device, got str\. Pass one"):
        jax_mla.supported("gpu")


def test_sizes_of_no_known_model_are_compared_with_the_nearest() -> None:
    glm = make_inputs(2, 1, model="GLM-5")
    for name, wrong, message in (
        ("q_norm", glm["q_norm"][:1536], r"q_norm must be \[2048\], got \[1536\]"),
        ("w_qb", glm["w_qb"][:, :1000], r"w_qb must be \[H \* 256, 2048\] .* got \[256, 1000\]"),
        ("w_uk", glm["w_uk"][:, :100], r"w_uk must be \[H, 192, 512\] .* got \[1, 100, 512\]"),
    ):
        with pytest.raises(ValueError, match=message):
            absorb(glm | {name: wrong})


def lowered(inputs: dict[str, Any], **options: Any) -> str:
    step = jax.jit(lambda given: absorb(given, **options))
    return str(step.trace(inputs).lower(lowering_platforms=("cuda",)).as_text())


@by_name
@pytest.mark.parametrize("style", [None, *STYLES])
def test_the_call_of_a_kernel_has_what_the_form_needs(
    style: str | None, cache: CacheFormat
) -> None:
    inputs = make_inputs(3, 2, rope=style, cache=cache.name, pages=4, page_size=5)
    for q_dtype, form in zip(cache.q_dtypes, ("fp8", "bf16")[-len(cache.q_dtypes) :], strict=True):
        options = {"implementation": "cuda", "q_dtype": q_dtype, "return_q_norm": True}
        text = lowered(inputs, **options)
        [call] = [line for line in text.splitlines() if "@jax_mla_q_absorb" in line]
        assert f'kernel = "{variants.choose(3, 2).key}_{form}"' in call
        assert f"style = {(None, *STYLES).index(style)} : i32" in call
        types = {"float8_e4m3fn": "f8E4M3FN", "bfloat16": "bf16", "uint8": "ui8"}
        rope = ", tensor<96x64xf32>, tensor<3xi32>" if style else ""
        stored = f"tensor<4x5x{inputs['cache'].shape[2]}x{types[cache.dtype]}>"
        assert f"{stored}, tensor<3xi32>, tensor<f32>, tensor<f32>{rope})" in call
        assert call.endswith(
            f"-> (tensor<3x2x576x{types[q_dtype]}>, {stored}, tensor<3x1536xbf16>)"
        )
        assert "output_tuple_indices = [1]" in call


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the call would run")
@by_name
@pytest.mark.parametrize("style", [None, *STYLES])
def test_xla_hands_the_library_all_that_the_call_has(style: str | None, cache: CacheFormat) -> None:
    """On a CPU the stream, argument 0 of the handler, is the only thing that it does not get."""
    handler = jax.ffi.pycapsule(library().JaxMlaQAbsorb)
    jax.ffi.register_ffi_target(runtime.TARGET, handler, platform="cpu")
    inputs = make_inputs(3, 2, rope=style, cache=cache.name)
    form = form_of(inputs, style=style, q_latent=style is not None)
    arrays = {**inputs, "q_scale": jnp.float32(1), "k_scale": jnp.float32(1)}
    if rope := arrays.pop("rope", None):
        arrays |= {"cos_sin": rope.cos_sin, "positions": rope.positions}
    call = functools.partial(primitive._kernel, form=form, key="small_c8_t1", eps=1e-6)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"bad operands at: 0\)[\s\S]*get platform"
    ):
        jax.block_until_ready(jax.jit(call)(*arrays.values()))


@pytest.mark.parametrize(
    ("options", "message", "has_kernel"),
    [
        ({"rope": "half"}, "no GPU has run them", True),
        ({"cache": "bf16"}, "no GPU has run them", True),
        ({"cache": "fp8_ds_mla"}, "no GPU has run them", True),
        ({"model": "GLM-5"}, "no kernel is shipped for the sizes of GLM-5, only for", False),
    ],
)
def test_auto_takes_the_reference_where_no_kernel_is_proven(
    options: dict[str, Any], message: str, has_kernel: bool, caplog: pytest.LogCaptureFixture
) -> None:
    inputs = make_inputs(2, 1, **options)
    with caplog.at_level(logging.WARNING, "jax_mla"):
        assert "custom_call" not in lowered(inputs)
    assert [message in record.getMessage() for record in caplog.records] == [True]
    assert "custom_call" not in lowered(inputs, implementation="reference")
    if has_kernel:
        assert "@jax_mla_q_absorb" in lowered(inputs, implementation="cuda")
        return
    with pytest.raises(jax_mla.UnsupportedError, match=message):
        lowered(inputs, implementation="cuda")


def test_supported_knows_formats_and_models() -> None:
    for options, message in (
        ({"cache": "fp4"}, "cache must be one of e4m3, bf16, fp8_ds_mla, got 'fp4'"),
        ({"model": "Llama"}, "model must be one of DeepSeek, GLM-5, .* got 'Llama'"),
        ({"cache": "bf16", "q_dtype": E4M3}, "q_dtype must be bfloat16 with bf16 cache rows"),
    ):
        with pytest.raises(ValueError, match=message):
            jax_mla.supported(jax.devices("cpu")[0], **options)
