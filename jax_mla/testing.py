"""What tests of q_absorb need: inputs, a float64 oracle, and distances between FP8 arrays."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jax_mla.rules import HEAD_ROWS, KV_RANK, NOPE, Q_RANK, QKV_COLUMNS, ROW, Array

Bytes = npt.NDArray[np.uint8]
Doubles = npt.NDArray[np.float64]

SMALL = 1 / 16
"""Share of a row's RMS below which cancellation may cost several steps."""

SMALLEST = 4 * 2**-9
"""Share of a row's RMS by which such a value may be off in any case."""


def make_inputs(
    batch: int,
    heads: int,
    *,
    pages: int | None = None,
    page_size: int = 64,
    columns: int = QKV_COLUMNS,
    seed: int = 0,
) -> dict[str, Any]:
    """Returns random arguments of q_absorb, scaled so that queries and cache rows have RMS near 1.

    Args:
        batch: B.
        heads: H.
        pages: P; None for about twice the rows that the batch needs.
        page_size: S.
        columns: W.
        seed: of the random numbers.

    Returns:
        qkv, q_norm, kv_norm, w_qb, w_uk, cache and slots by name. The cache is full of random
        bytes without NaN; no two slots are equal.

    Raises:
        ValueError: the cache has fewer rows than the batch.
    """
    if pages is None:
        pages = max(2, -(-2 * batch // page_size))
    if pages * page_size < batch:
        raise ValueError(
            f"pages * page_size must be at least batch = {batch}, got {pages} * {page_size}."
            " Give the cache more pages."
        )
    rng = np.random.default_rng(seed)

    def normal(*shape: int, mean: float = 0.0, deviation: float = 1.0) -> jax.Array:
        values = mean + deviation * rng.standard_normal(shape, np.float32)
        return jnp.asarray(values.astype(jnp.bfloat16))

    cached = rng.integers(0, 256, (pages, page_size, ROW), np.uint8)
    cached[(cached & 0x7F) == 0x7F] = 0
    return {
        "qkv": normal(batch, columns),
        "q_norm": normal(Q_RANK, mean=1.0, deviation=0.1),
        "kv_norm": normal(KV_RANK, mean=1.0, deviation=0.1),
        "w_qb": normal(heads * HEAD_ROWS, Q_RANK, deviation=Q_RANK**-0.5),
        "w_uk": normal(heads, NOPE, KV_RANK, deviation=NOPE**-0.5),
        "cache": jnp.asarray(cached.view(jnp.float8_e4m3fn)),
        "slots": jnp.asarray(rng.choice(pages * page_size, batch, replace=False).astype(np.int32)),
    }


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """What a call must return, from float64 with the specified rounding points.

    Attributes:
        query: [B, H, 576] e4m3.
        values: [B, H, 576] float64, the queries over q_scale before they become bytes.
        cache: [P, S, 576] e4m3.
        written: [P, S] bool, the rows that the call stores.
    """

    query: npt.NDArray[Any]
    values: Doubles
    cache: npt.NDArray[Any]
    written: npt.NDArray[np.bool_]


@np.errstate(divide="ignore", invalid="ignore")  # a scale of 0 and rows with Inf are defined
def oracle(
    inputs: Mapping[str, Any], q_scale: float = 1.0, k_scale: float = 1.0, eps: float = 1e-6
) -> Oracle:
    """Returns the right results for arguments by name, as `make_inputs` gives them.

    The inputs are copied: a call may take the cache by donation afterwards.
    """
    x, q_norm, kv_norm, w_qb, w_uk = (
        np.asarray(inputs[name]).astype(np.float64)
        for name in ("qkv", "q_norm", "kv_norm", "w_qb", "w_uk")
    )
    heads = w_uk.shape[0]
    k_pe = x[:, Q_RANK + KV_RANK : QKV_COLUMNS]
    latent = _rms_norm(x[:, :Q_RANK], q_norm, eps)
    q = round_to_bf16(latent @ w_qb.T).reshape(-1, heads, HEAD_ROWS)
    nope = np.matmul(q[:, :, :NOPE].transpose(1, 0, 2), w_uk).transpose(1, 0, 2)
    values = np.concatenate([round_to_bf16(nope), q[:, :, NOPE:]], axis=2) * _reciprocal(q_scale)
    row = np.concatenate([_rms_norm(x[:, Q_RANK : Q_RANK + KV_RANK], kv_norm, eps), k_pe], axis=1)
    cache = np.array(inputs["cache"])
    flat = cache.reshape(-1, ROW)
    written = np.zeros(len(flat), np.bool_)
    stored = round_to_e4m3(row * _reciprocal(k_scale))
    for slot, stored_row in zip(np.asarray(inputs["slots"]).tolist(), stored, strict=True):
        if 0 <= slot < len(flat):
            flat[slot] = stored_row
            written[slot] = True
    return Oracle(
        query=round_to_e4m3(values),
        values=values,
        cache=cache,
        written=written.reshape(cache.shape[:2]),
    )


def _rms_norm(x: Doubles, weight: Doubles, eps: float) -> Doubles:
    mean = np.square(x).sum(axis=1, keepdims=True) / x.shape[1]
    return round_to_bf16(x / np.sqrt(mean + float(np.float32(eps))) * weight)


def _reciprocal(scale: float) -> float:
    return float(np.float32(1) / np.float32(scale))


def round_to_bf16(x: Doubles) -> Doubles:
    """Returns the nearest BF16 values, ties to even, as float64."""
    return _round(x, bits=8, min_exponent=-126)


def round_to_e4m3(x: Doubles) -> npt.NDArray[Any]:
    """Returns the nearest e4m3 values, ties to even, saturating at +-448, any NaN as 0x7F."""
    saturated = np.clip(_round(x, bits=4, min_exponent=-6), -448, 448)
    # A cast keeps the sign of a NaN, so take the positive one.
    rounded: npt.NDArray[Any] = np.where(np.isnan(x), np.nan, saturated)
    return rounded.astype(jnp.float8_e4m3fn)


def _round(x: Doubles, *, bits: int, min_exponent: int) -> Doubles:
    """Rounds to `bits` significant bits; values below 2**min_exponent have the step of that one."""
    exponent = np.maximum(np.frexp(x)[1] - 1, min_exponent) - (bits - 1)
    rounded: Doubles = np.ldexp(np.rint(np.ldexp(x, -exponent)), exponent)
    return rounded


def e4m3_steps(actual: Array, expected: Array) -> npt.NDArray[np.int32]:
    """Returns the distance in representable values; +0 equals -0, NaN against a number is 255.

    Args:
        actual, expected: e4m3 arrays of one shape, or their bytes.
    """
    a, b = (bytes_of(x).astype(np.int32) for x in (actual, expected))
    nan_a, nan_b = ((u & 0x7F) == 0x7F for u in (a, b))
    distance = np.abs(_order(a) - _order(b))
    steps: npt.NDArray[np.int32] = np.where(nan_a | nan_b, 255 * (nan_a ^ nan_b), distance)
    return steps


def bytes_of(x: Any) -> Bytes:
    """Returns the bytes of an array of an 8-bit type, to compare NaN and signs of zero too."""
    return np.asarray(x).view(np.uint8)


def _floats(x: Any) -> npt.NDArray[np.float32]:
    values: npt.NDArray[np.float32] = bytes_of(x).view(jnp.float8_e4m3fn).astype(np.float32)
    return values


def _order(u: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    return np.where(u & 0x80, -(u & 0x7F), u & 0x7F)


def check_query(actual: Array, expected: Oracle) -> None:
    """Checks queries against the oracle.

    At most one step where a value is above 1/16 of its row's RMS. Below, at most 4 steps or 1/128
    of the RMS, which is 4 of e4m3's smallest steps where the RMS is 1 (values that cancel to almost
    nothing have more steps between them where q_scale is small). At most 1 % of places differ at
    all. NaN is 0x7F.

    Raises:
        AssertionError: they are further away; the text counts the places.
    """
    steps = e4m3_steps(actual, expected.query)
    rms = np.sqrt(np.mean(np.square(expected.values), axis=2, keepdims=True))
    distance = np.abs(_floats(actual) - _floats(expected.query))
    small = ~(np.abs(expected.values) > SMALL * rms)
    far = np.where(small, (steps > 4) & ~(distance <= SMALLEST * rms), steps > 1)
    differing = np.count_nonzero(steps)
    far_large, far_small = np.count_nonzero(far & ~small), np.count_nonzero(far & small)
    negative_nan = np.count_nonzero(bytes_of(actual) == 0xFF)
    if far_large or far_small or negative_nan or differing > steps.size / 100:
        raise AssertionError(
            f"of {steps.size} query bytes {differing} differ (1 % may), {far_large} large ones by"
            f" more than 1 step, {far_small} small ones by more than 4 (none may); {negative_nan}"
            f" are 0xFF (none may). Furthest: {steps.max()} steps."
        )


def check_cache(actual: Array, expected: Oracle) -> None:
    """Checks the updated cache against the oracle.

    Stored bytes: at most one step, at most 0.1 % of places differ. Other rows: the same bits.

    Raises:
        AssertionError: they are further away; the text counts the places.
    """
    changed = bytes_of(actual)[~expected.written] != bytes_of(expected.cache)[~expected.written]
    stored, wanted = bytes_of(actual)[expected.written], bytes_of(expected.cache)[expected.written]
    steps = e4m3_steps(stored, wanted)
    differing, far = np.count_nonzero(steps), np.count_nonzero(steps > 1)
    negative_nan = np.count_nonzero(stored == 0xFF)
    if changed.any() or far or negative_nan or differing > steps.size / 1000:
        raise AssertionError(
            f"of {steps.size} stored cache bytes {differing} differ (0.1 % may), {far} by more than"
            f" 1 step, {negative_nan} are 0xFF (none may); {np.count_nonzero(changed)} bytes of"
            " other rows changed (none may)."
        )
