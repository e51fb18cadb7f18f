"""FP32 to e4m3 inside the kernels, for every value that can reach it.

What is converted is f32(bf16 value) * (1 / scale). Inputs are built so that the value is any BF16
pattern but subnormal ones:

- cache: k_pe is converted as it is, so 1024 rows of it hold all patterns.
- query: the q latent is zero but for its first column, which the norm turns into exactly 1. Then a
  rope row of Q_B with pattern v in that column yields v; and a nope row with 1 there yields the row
  of W_UK, all patterns over 128 heads.

At scale 1 that covers every tie between neighbours of e4m3 (five significant bits), both infinities
and all NaN. A product cannot carry the payload of a NaN further, so FP32 NaN patterns enter where
FP32 itself enters: as the scales.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from kernel_calls import kernel_bytes

import jax_mla
from jax_mla import variants
from jax_mla.rules import HEAD_ROWS, KV_RANK, MAX_HEADS, NOPE, Q_RANK, ROPE
from jax_mla.testing import Bytes, bytes_of, e4m3_steps, make_inputs, round_to_e4m3

BITS = np.arange(2**16, dtype=np.uint16)
# FP32 arithmetic may take subnormals for zero, which a scale of 0 would show: zeros instead.
PATTERNS = np.where(BITS & 0x7F80, BITS, BITS & 0x8000).view(ml_dtypes.bfloat16)
SCALES = (1.0, 2.0**-8, 2.0**7, 0.37, 3.0)
HOSTILE_SCALES = (0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 2.0**126, -1.0)
EPS = 1e-12
CHUNKS = PATTERNS.reshape(-1, MAX_HEADS * ROPE)
VARIANTS = pytest.mark.parametrize("key", [variant.key for variant in variants.PLAIN_VARIANTS])


def expected_bytes(values: npt.NDArray[ml_dtypes.bfloat16], scale: float) -> Bytes:
    with np.errstate(all="ignore"):
        products = values.astype(np.float32) * (np.float32(1) / np.float32(scale))
        return bytes_of(round_to_e4m3(products.astype(np.float64)))


def assert_same(actual: Bytes, expected: Bytes) -> None:
    """Equal but for the sign of zero, which a sum does not keep; NaN is 0x7F on both sides."""
    fp8 = ml_dtypes.float8_e4m3fn
    wrong = e4m3_steps(actual.view(fp8), expected.view(fp8)) > 0
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size}, first at {np.argwhere(wrong)[0]}"
    assert not (actual == 0xFF).any()


def test_the_patterns_hold_every_tie() -> None:
    finite = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ties = (finite[1:] + finite[:-1]) / 2
    assert np.isin(np.append(ties, [464, -464]), PATTERNS.astype(np.float32)).all()


@VARIANTS
def test_every_bf16_pattern_through_the_cache_insert(key: str) -> None:
    batch = len(PATTERNS) // ROPE
    inputs = make_inputs(batch, 1, pages=batch // 64, page_size=64)
    k_pe = jnp.asarray(PATTERNS.reshape(batch, ROPE))
    inputs = {**inputs, "qkv": inputs["qkv"].at[:, -ROPE:].set(k_pe)}
    scales = (*SCALES, *HOSTILE_SCALES)
    cases = [{**inputs, "k_scale": jnp.float32(scale)} for scale in scales]
    for scale, (_, cache) in zip(scales, kernel_bytes(cases, key), strict=True):
        stored = cache.reshape(batch, -1)[np.asarray(inputs["slots"]), KV_RANK:]
        assert_same(stored, expected_bytes(PATTERNS, scale).reshape(batch, ROPE))


@functools.cache
def one_hot_cases(batch: int) -> list[dict[str, jax.Array]]:
    """Inputs whose queries are PATTERNS in the nope and a case's chunk in the rope columns."""
    inputs = make_inputs(batch, MAX_HEADS, pages=1, page_size=batch)
    return [one_hot_inputs(inputs, chunk) for chunk in CHUNKS]


def one_hot_inputs(
    inputs: dict[str, jax.Array], rope: npt.NDArray[ml_dtypes.bfloat16]
) -> dict[str, jax.Array]:
    batch = len(inputs["qkv"])
    latent = jnp.zeros((batch, Q_RANK), jnp.bfloat16).at[:, 0].set(1)
    w_qb = jnp.zeros((MAX_HEADS, HEAD_ROWS, Q_RANK), jnp.bfloat16).at[:, 0, 0].set(1)
    w_qb = w_qb.at[:, NOPE:, 0].set(rope.reshape(MAX_HEADS, ROPE))
    w_uk = jnp.zeros((MAX_HEADS, NOPE, KV_RANK), jnp.bfloat16)
    return {
        **inputs,
        "qkv": inputs["qkv"].at[:, :Q_RANK].set(latent),
        # The norm multiplies a one-hot row by sqrt(1536); the nearest BF16 of its inverse makes 1.
        "q_norm": jnp.full(Q_RANK, Q_RANK**-0.5, jnp.bfloat16),
        "w_qb": w_qb.reshape(-1, Q_RANK),
        "w_uk": w_uk.at[:, 0].set(PATTERNS.reshape(MAX_HEADS, KV_RANK)),
    }


@VARIANTS
def test_every_bf16_pattern_through_the_query(key: str) -> None:
    cases = one_hot_cases(batch=3)
    for chunk, (q, _) in zip(CHUNKS, kernel_bytes(cases, key, eps=EPS), strict=True):
        assert_query(q, chunk, scale=1)
    scales = (*SCALES, *HOSTILE_SCALES)
    scaled = [{**cases[0], "q_scale": jnp.float32(scale)} for scale in scales]
    for scale, (q, _) in zip(scales, kernel_bytes(scaled, key, eps=EPS), strict=True):
        assert_query(q, CHUNKS[0], scale)


def assert_query(q: Bytes, rope: npt.NDArray[ml_dtypes.bfloat16], scale: float) -> None:
    nope_expected = expected_bytes(PATTERNS, scale).reshape(MAX_HEADS, KV_RANK)
    rope_expected = expected_bytes(rope, scale).reshape(MAX_HEADS, ROPE)
    expected = np.concatenate([nope_expected, rope_expected], axis=1)
    assert_same(q, np.broadcast_to(expected, q.shape).copy())


@pytest.mark.parametrize("batch", [1, 16])
def test_nan_scales_of_every_kind_store_0x7f(batch: int) -> None:
    """Both signs of 16384 payloads, evenly spread over the 2**23 - 1 of FP32, as both scales."""
    payloads = np.linspace(1, 2**23 - 1, 2**14, dtype=np.uint32)
    nans = np.concatenate([payloads | 0x7F800000, payloads | 0xFF800000]).view(np.float32)
    assert np.isnan(nans).all()
    inputs = make_inputs(batch, 1, pages=1, page_size=batch)
    others: dict[str, Any] = {name: x for name, x in inputs.items() if name != "cache"}

    def wrong_bytes(stored: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.bitcast_convert_type(stored, jnp.uint8) != 0x7F, dtype=jnp.int32)

    def step(
        carry: tuple[jax.Array, jax.Array], scale: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        cache, wrong = carry
        q, cache = jax_mla.q_absorb(
            cache=cache, **others, q_scale=scale, k_scale=scale, implementation="cuda"
        )
        return (cache, wrong + wrong_bytes(q) + wrong_bytes(cache)), None

    start = inputs["cache"], jnp.int32(0)
    (_, wrong), _ = jax.jit(lambda scales: jax.lax.scan(step, start, scales, unroll=16))(nans)
    assert int(wrong) == 0
