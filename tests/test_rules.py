"""Each wrong argument is named, with what was expected, what came and what to do."""

import math
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_mla
from jax_mla.rules import Problem, check_limits, form_of, problem_of

E4M3, BF16, F32, I32 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32, jnp.int32


def aval(dtype: Any, *shape: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def arguments(**changes: Any) -> dict[str, Any]:
    """A call of 3 tokens and 2 heads on 4 pages of 8 rows, with some arguments replaced."""
    right = {
        "qkv": aval(BF16, 3, 2112),
        "q_norm": aval(BF16, 1536),
        "kv_norm": aval(BF16, 512),
        "w_qb": aval(BF16, 384, 1536),
        "w_uk": aval(BF16, 2, 128, 512),
        "cache": aval(E4M3, 4, 8, 576),
        "slots": aval(I32, 3),
        "q_scale": aval(F32),
        "k_scale": aval(F32),
    }
    return right | changes


def checked(arrays: dict[str, Any]) -> Problem:
    return problem_of(arrays, form_of(arrays))


WRONG_SHAPES = [
    ("qkv", aval(BF16, 3, 2111), ("2112", "2111", "k_pe")),
    ("qkv", aval(BF16, 2112), ("[B, W]", "[2112]", "k_pe")),
    ("q_norm", aval(BF16, 512), ("[1536]", "[512]", "q_a_layernorm")),
    ("q_norm", aval(BF16, 1, 1536), ("[1536]", "[1, 1536]", "q_a_layernorm")),
    ("kv_norm", aval(BF16, 1536), ("[512]", "[1536]", "kv_a_layernorm")),
    ("w_qb", aval(BF16, 1536, 384), ("[384, 1536]", "[1536, 384]", "not transposed")),
    ("w_qb", aval(BF16, 192, 1536), ("[384, 1536]", "[192, 1536]", "same heads")),
    ("w_uk", aval(BF16, 2, 512, 128), ("[2, 128, 512]", "[2, 512, 128]", "kv_b_proj")),
    ("w_uk", aval(BF16, 256, 512), ("[H, 128, 512]", "[256, 512]", "kv_b_proj")),
    ("cache", aval(E4M3, 32, 576), ("[P, S, 576]", "[32, 576]", "zeros")),
    ("cache", aval(E4M3, 4, 8, 512), ("[4, 8, 576]", "[4, 8, 512]", "zeros")),
    ("slots", aval(I32, 4), ("[3]", "[4]", "-1")),
    ("slots", aval(I32, 3, 1), ("[3]", "[3, 1]", "-1")),
    ("q_scale", aval(F32, 1), ("[]", "[1]", "One scale")),
    ("k_scale", aval(F32, 3), ("[]", "[3]", "One scale")),
]

BEYOND_A_DEVICE = [
    ("qkv", {"batch": 4097}, ("4096", "got 4097", "Split")),
    ("w_uk", {"heads": 0}, ("1 to 128", "got 0", "Split")),
    ("w_uk", {"heads": 129}, ("1 to 128", "got 129", "Split")),
    ("cache", {"page_size": 0}, ("at least 1 row", "P, S = 4, 0", "size")),
    ("cache", {"pages": 2**20, "page_size": 2**11}, ("2147483647", "1048576 * 2048", "layer")),
]

WRONG_DTYPES = [
    ("qkv", aval(F32, 3, 2112), ("bfloat16", "float32", "astype")),
    ("q_norm", aval(F32, 1536), ("bfloat16", "float32", "astype")),
    ("kv_norm", aval(jnp.float16, 512), ("bfloat16", "float16", "astype")),
    ("w_qb", aval(E4M3, 384, 1536), ("bfloat16", "float8_e4m3fn", "astype")),
    ("w_uk", aval(F32, 2, 128, 512), ("bfloat16", "float32", "astype")),
    ("cache", aval(F32, 4, 8, 576), ("float8_e4m3fn", "float32", "astype")),
    ("cache", aval(jnp.float8_e5m2, 4, 8, 576), ("float8_e4m3fn", "float8_e5m2", "astype")),
    ("cache", aval(jnp.uint8, 4, 8, 576), ("float8_e4m3fn", "uint8", "bitcast_convert_type(cache")),
    ("slots", aval(jnp.uint32, 3), ("int32", "uint32", "astype")),
    ("slots", np.zeros(3, np.int64), ("int32", "int64", "astype")),
    ("slots", [0, 1, 2], ("an array of int32", "list", "jnp.asarray")),
    ("q_scale", aval(BF16), ("float32", "bfloat16", "astype")),
    ("k_scale", aval(I32), ("float32", "int32", "astype")),
    ("k_scale", None, ("float32", "NoneType", "jnp.asarray")),
]


def name_of(value: Any) -> str | None:
    return str(getattr(value, "shape", value)) if not isinstance(value, str | tuple) else None


def assert_says(message: str, name: str, words: tuple[str, ...]) -> None:
    assert message.startswith(f"{name} must "), message
    assert all(word in message for word in words), message
    assert message.count("got ") == 1, message
    assert re.fullmatch(r".+\. [A-Z].+\.", message), f"no remedy in: {message}"


@pytest.mark.parametrize(("name", "value", "words"), WRONG_SHAPES, ids=name_of)
def test_a_wrong_shape_is_a_value_error(name: str, value: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is checked below
        checked(arguments(**{name: value}))
    assert_says(str(caught.value), name, words)


@pytest.mark.parametrize(("name", "sizes", "words"), BEYOND_A_DEVICE)
def test_what_no_device_can_do_is_a_value_error(
    name: str, sizes: dict[str, Any], words: tuple[str, ...]
) -> None:
    problem = replace(checked(arguments()), **sizes)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        check_limits(problem)
    assert_says(str(caught.value), name, words)
    check_limits(Problem(batch=4096, heads=128, pages=2**20, page_size=2**11 - 1, columns=2112))


def test_limits_are_checked_while_tracing() -> None:
    many = arguments(w_qb=aval(BF16, 129 * 192, 1536), w_uk=aval(BF16, 129, 128, 512))
    with pytest.raises(ValueError, match="w_uk must have 1 to 128 heads on a device, got 129"):
        jax.eval_shape(lambda given: jax_mla.q_absorb(**given), many)


@pytest.mark.parametrize(("name", "value", "words"), WRONG_DTYPES, ids=name_of)
def test_a_wrong_dtype_is_a_type_error(name: str, value: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(TypeError) as caught:
        checked(arguments(**{name: value}))
    assert_says(str(caught.value), name, words)


def test_sizes_known_only_at_run_time_are_refused() -> None:
    (batch,) = jax.export.symbolic_shape("b")
    with pytest.raises(TypeError) as caught:
        checked(arguments(qkv=aval(BF16, batch, 2112)))
    assert_says(str(caught.value), "qkv", ("plain integers", "b", "Trace"))


def as_float(number: float) -> float:
    return math.inf if number == 10**400 else float(number)


@pytest.mark.parametrize("name", ["q_scale", "k_scale"])
@pytest.mark.parametrize(
    "scale", [0, 0.0, -1.0, math.inf, -math.inf, math.nan, 1e-50, 1e39, 10**400]
)
def test_python_scales_must_be_finite_and_positive(name: str, scale: float) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        call(**{name: scale})
    assert_says(str(caught.value), name, ("finite and positive", str(as_float(scale)), "scale"))


@pytest.mark.parametrize("eps", [-1e-6, math.inf, math.nan, 1e39, 10**400])
def test_eps_must_be_finite_and_not_negative(eps: float) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        call(eps=eps)
    assert_says(
        str(caught.value), "eps", ("finite and at least 0", str(as_float(eps)), "rms_norm_eps")
    )


def test_eps_must_be_known_while_tracing() -> None:
    with pytest.raises(TypeError) as caught:
        jax.jit(lambda eps: call(eps=eps))(1e-6)
    assert_says(str(caught.value), "eps", ("Python float", "Tracer", "configuration"))


def test_an_unknown_implementation_is_refused() -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        call(implementation="triton")
    assert_says(str(caught.value), "implementation", ("auto, cuda, reference", "'triton'", "auto"))


def call(**options: Any) -> Any:
    operands = arguments()
    for name in ("q_scale", "k_scale"):
        options.setdefault(name, operands.pop(name))
        operands.pop(name, None)
    return jax.eval_shape(lambda given: jax_mla.q_absorb(**given, **options), operands)


def test_the_public_function_checks_while_tracing() -> None:
    wrong: dict[str, Any] = {name: jnp.zeros(a.shape, a.dtype) for name, a in arguments().items()}
    wrong["slots"] = jnp.zeros(4, I32)
    for transformed in (jax_mla.q_absorb, jax.jit(jax_mla.q_absorb)):
        with pytest.raises(ValueError, match=r"slots must be .* = \[3\], got \[4\]"):
            transformed(**wrong)
    with pytest.raises(ValueError, match=r"slots must be .* = \[3\], got \[4\]"):
        jax.eval_shape(jax_mla.q_absorb, **wrong)


@pytest.mark.parametrize("columns", [2112, 2113, 3648])
def test_a_right_call_has_these_sizes(columns: int) -> None:
    problem = checked(arguments(qkv=aval(BF16, 3, columns)))
    assert problem == Problem(batch=3, heads=2, pages=4, page_size=8, columns=columns)
    assert problem.rows == 32


def test_bytes_and_operations_count_every_array_once() -> None:
    operands = arguments()
    moved = ("q_norm", "kv_norm", "w_qb", "w_uk", "slots")
    weights = sum(operands[name].size * operands[name].dtype.itemsize for name in moved)
    tokens = 3 * (2112 * 2 + 2 * 576 + 576)  # qkv read; queries of two heads and a row written
    problem = checked(operands)
    assert problem.bytes_moved == weights + tokens
    assert problem.flops == 2 * 3 * (operands["w_qb"].size + operands["w_uk"].size)
