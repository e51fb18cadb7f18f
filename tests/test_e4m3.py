"""The conversion to e4m3: nearest even, saturating, one NaN; and what scales do to it."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

import jax_mla
from jax_mla.reference import quantize
from jax_mla.testing import Bytes, bytes_of, e4m3_steps, make_inputs, round_to_e4m3

Floats = npt.NDArray[np.float32]


def stored(values: Any, scale: float | np.float32 = 1.0) -> Bytes:
    """Bytes of FP32 values, compiled."""
    quantized = jax.jit(quantize)(np.asarray(values, np.float32), np.float32(scale))
    return bytes_of(quantized)


def e4m3_values() -> Floats:
    """The 253 finite values in order (zero once)."""
    values = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
    return np.unique(values[np.isfinite(values)])


@pytest.mark.parametrize(
    ("value", "byte"),
    [
        (0.0, 0x00),
        (-0.0, 0x80),
        (448.0, 0x7E),
        (449.0, 0x7E),
        (464.0, 0x7E),
        (464.1, 0x7E),  # a cast alone gives NaN from here on
        (1e4, 0x7E),
        (np.finfo(np.float32).max, 0x7E),
        (np.inf, 0x7E),
        (-449.0, 0xFE),
        (-1e4, 0xFE),
        (-np.inf, 0xFE),
        (2.0**-6, 0x08),  # smallest normal
        (7 * 2.0**-9, 0x07),  # largest subnormal
        (2.0**-9, 0x01),
        (2.0**-10, 0x00),  # tie between 0 and the smallest subnormal
        (1.5 * 2.0**-9, 0x02),  # tie between the first two subnormals
        (7.5 * 2.0**-9, 0x08),  # tie between subnormal and normal
        (1e-30, 0x00),
        (-1e-30, 0x80),
    ],
)
def test_edges(value: float, byte: int) -> None:
    assert stored([value]).tolist() == [byte]


def test_any_nan_is_0x7f() -> None:
    payloads = [0x000001, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFF]
    patterns = [0x7F800000 | sign | p for sign in (0, 0x80000000) for p in payloads]
    assert set(stored(np.array(patterns, np.uint32).view(np.float32)).tolist()) == {0x7F}


def test_representable_values_stay() -> None:
    values = e4m3_values()
    assert len(values) == 253
    np.testing.assert_array_equal(stored(values).view(jnp.float8_e4m3fn).astype(np.float32), values)


def test_ties_go_to_even_and_neighbours_to_the_nearest() -> None:
    values = e4m3_values()
    ties = (values[1:] + values[:-1]) / 2
    below, above = np.nextafter(ties, np.float32(-np.inf)), np.nextafter(ties, np.float32(np.inf))
    assert not (stored(ties) & 1).any()
    assert not e4m3_steps(stored(below), values[:-1].astype(jnp.float8_e4m3fn)).any()
    assert not e4m3_steps(stored(above), values[1:].astype(jnp.float8_e4m3fn)).any()


def test_the_oracle_rounds_alike() -> None:
    rng = np.random.default_rng(0)
    values = np.exp(rng.uniform(-9, 7, 100_000)) * rng.choice([-1, 1], 100_000)
    values = np.concatenate([values, [449, 464.1, 1e4, np.inf, -np.inf, np.nan, -np.nan, 0, -0.0]])
    values = values.astype(np.float32)
    expected = bytes_of(round_to_e4m3(values.astype(np.float64)))
    np.testing.assert_array_equal(stored(values), expected)


def test_values_are_multiplied_by_the_reciprocal() -> None:
    """A quotient rounds once and would give other bytes at ties."""
    scale = np.float32(0.3)
    values = e4m3_values()
    ties = (values[1:] + values[:-1]) / 2 * scale
    ties = np.concatenate([ties, np.nextafter(ties, np.float32(0))])
    product, quotient = (
        bytes_of(round_to_e4m3(x.astype(np.float64)))
        for x in (ties * (np.float32(1) / scale), ties / scale)
    )
    assert (product != quotient).any()
    np.testing.assert_array_equal(stored(ties, scale), product)


@pytest.mark.parametrize(
    ("scale", "bytes_"),
    [
        (0.0, [0x7E, 0xFE, 0x7F, 0x7F]),
        (-1.0, [0xB8, 0x38, 0x80, 0x7F]),
        (np.inf, [0x00, 0x80, 0x00, 0x7F]),
        (np.nan, [0x7F, 0x7F, 0x7F, 0x7F]),
    ],
)
def test_odd_scales_follow_the_same_arithmetic(scale: float, bytes_: list[int]) -> None:
    """They raise as Python numbers; traced ones are taken as they are."""
    assert stored([1.0, -1.0, 0.0, np.nan], scale).tolist() == bytes_


@pytest.mark.parametrize("scale", [0.0, np.inf, np.nan])
def test_odd_traced_scales_reach_queries_and_cache(scale: float) -> None:
    inputs = make_inputs(2, 1)
    q, cache = jax.jit(jax_mla.q_absorb)(
        **inputs, q_scale=jnp.float32(scale), k_scale=jnp.float32(scale)
    )
    rows = np.asarray(cache).reshape(-1, 576)[np.asarray(inputs["slots"])]
    allowed = {0.0: {0x7E, 0xFE, 0x7F}, np.inf: {0x00, 0x80}}.get(scale, {0x7F})
    for result in (np.asarray(q), rows):
        assert set(bytes_of(result).ravel().tolist()) <= allowed


def test_every_bf16_pattern_goes_through_k_pe() -> None:
    """k_pe is stored without a norm: 1024 tokens of 64 columns hold all 65536 patterns."""
    patterns = np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16).reshape(1024, 64)
    inputs = make_inputs(1024, 1)
    qkv = inputs["qkv"].at[:, 2048:].set(patterns)
    _, cache = jax_mla.q_absorb(**inputs | {"qkv": qkv}, k_scale=0.75)
    rows = np.asarray(cache).reshape(-1, 576)[np.asarray(inputs["slots"])]
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = patterns.astype(np.float32) * (np.float32(1) / np.float32(0.75))
    expected = round_to_e4m3(scaled.astype(np.float64))
    np.testing.assert_array_equal(bytes_of(rows[:, 512:]), bytes_of(expected))
    assert not np.isnan(rows[:, :512].astype(np.float32)).any()


def test_steps_are_one_between_neighbours() -> None:
    values = e4m3_values().astype(jnp.float8_e4m3fn)
    assert (e4m3_steps(values[1:], values[:-1]) == 1).all()
    assert e4m3_steps(values[:1], values[-1:]).tolist() == [252]


def test_steps_of_zeros_and_nans() -> None:
    codes = np.array([0x00, 0x80, 0x7F, 0xFF, 0x38], np.uint8)
    pairs = {(a, b): int(e4m3_steps(a, b)) for a, b in itertools.product(codes, codes)}
    assert pairs[0x00, 0x80] == 0
    assert pairs[0x7F, 0xFF] == 0
    assert pairs[0x7F, 0x38] == pairs[0x38, 0xFF] == 255
