"""Distances between results and the oracle's, and how large they may be."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jax_mla.formats import BF16, FP8_DS_MLA
from jax_mla.rules import Array
from jax_mla.testing.oracle import Oracle
from jax_mla.testing.rounding import Doubles

Bytes = npt.NDArray[np.uint8]
Steps = npt.NDArray[np.int32]

SMALL = 1 / 16
"""Share of a row's RMS below which cancellation may cost several steps."""

SMALL_ROTATED = 1 / 4
"""The same for rope columns of a rotated query, sums of products of two BF16 values with a cosine
and a sine. One of these values may have been rounded the other way. BF16's step is at most 1/128
of a value: 1/64 of the RMS where the value is twice the RMS. e4m3's is at least 1/16 of a value: no
less than that from 1/4 of the RMS on."""

SMALLEST = 4 * 2**-9
"""Share of a row's RMS by which such a value may be off in any case."""

BF16_NOISE = 2**-7
"""Share of a row's RMS by which a BF16 query may be off: a query latent or a nope value that lies
between two BF16 values and was rounded to the other one."""

BF16_RARE = 2**-5
"""The same for a few places: several such nope values, or a large value of a rotated pair whose sum
is small. BF16's step is at most 1/128 of a value: this much for one of 4 times the RMS, or for two
of 2.8 times whose errors add up."""

RARE_PLACES, RARE_SHARE = 8, 10_000
"""How many places these are: so many, or one in so many if that is more."""

CANCELLED = 2**-18
"""Share of a row's RMS by which FP32 may be off where the two terms of a rotation cancel."""


def bytes_of(x: Any) -> Bytes:
    """Returns the bytes of an array, to compare NaN and signs of zero too."""
    return np.asarray(x).view(np.uint8)


def e4m3_steps(actual: Array, expected: Array) -> Steps:
    """Returns the distance in representable values; +0 equals -0, NaN against a number is 255.

    Args:
        actual, expected: e4m3 arrays of one shape, or their bytes.
    """
    a, b = (bytes_of(x).astype(np.int32) for x in (actual, expected))
    return _steps(a, b, sign=0x80, is_nan=lambda u: (u & 0x7F) == 0x7F)


def bf16_steps(actual: Array, expected: Array) -> Steps:
    """Returns the distance in representable values; +0 equals -0, NaN against a number is 255.

    Args:
        actual, expected: BF16 arrays of one shape.
    """
    a, b = (np.asarray(x).view(np.uint16).astype(np.int32) for x in (actual, expected))
    return _steps(a, b, sign=0x8000, is_nan=lambda u: (u & 0x7FFF) > 0x7F80)


def _steps(a: Steps, b: Steps, *, sign: int, is_nan: Any) -> Steps:
    def order(u: Steps) -> Steps:
        magnitude = u & (sign - 1)
        return np.where(u & sign, -magnitude, magnitude)

    nan_a, nan_b = is_nan(a), is_nan(b)
    distance = np.abs(order(a) - order(b))
    steps: Steps = np.where(nan_a | nan_b, 255 * (nan_a ^ nan_b), distance)
    return steps


def check_query(actual: Array, expected: Oracle) -> None:
    """Checks queries against the oracle.

    FP8: at most one step where a value is above 1/16 of its row's RMS, or 1/4 in rotated columns.
    Below, at most 4 steps or 1/128 of the RMS, which is 4 of e4m3's smallest steps where the RMS is
    1 (values that cancel to almost nothing have more steps between them where q_scale is small). At
    most 1 % of places differ at all. NaN is 0x7F.

    BF16: at most one step or 1/128 of the row's RMS, but 1/32 in 8 places or 1 of 10,000, whichever
    is more; at most 5 % of places differ.

    Of the rope columns, which no second product smears, at most 1 % differ as e4m3 and 10 % as
    BF16, which a single step of one query latent may reach in a token.

    Raises:
        AssertionError: they are further away; the text counts the places.
    """
    _check_rope_columns(actual, expected)
    if expected.form.q_dtype == BF16.dtype:
        _check_bf16("query", actual, expected.query, BF16_NOISE, BF16_RARE, share=1 / 20)
        return
    steps = e4m3_steps(actual, expected.query)
    rms = np.sqrt(np.mean(np.square(expected.values), axis=2, keepdims=True))
    distance = np.abs(_floats(actual) - _floats(expected.query))
    small = ~(np.abs(expected.values) > _small_shares(expected) * rms)
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


def _small_shares(expected: Oracle) -> Doubles:
    """[576], the share of its row's RMS below which a value of a column is a small one."""
    columns = np.arange(expected.values.shape[2])
    rotated = (columns >= expected.form.geometry.kv_rank) & (expected.form.style is not None)
    return np.where(rotated, SMALL_ROTATED, SMALL)


def _check_rope_columns(actual: Array, expected: Oracle) -> None:
    is_bf16 = expected.form.q_dtype == BF16.dtype
    steps_between, share = (bf16_steps, 1 / 10) if is_bf16 else (e4m3_steps, 1 / 100)
    rope = steps_between(actual, expected.query)[:, :, expected.form.geometry.kv_rank :]
    differing = np.count_nonzero(rope)
    if differing > max(1, rope.size * share):
        raise AssertionError(
            f"of {rope.size} rope columns of queries {differing} differ ({share:.0%} may)"
        )


def _floats(x: Any) -> npt.NDArray[np.float32]:
    values: npt.NDArray[np.float32] = bytes_of(x).view(jnp.float8_e4m3fn).astype(np.float32)
    return values


def check_q_latent(actual: Array, expected: Oracle) -> None:
    """Checks the query latent: at most one BF16 step, at most 0.1 % of places differ.

    Raises:
        AssertionError: it is further away; the text counts the places.
    """
    _check_bf16("q_latent", actual, expected.q_latent.astype(jnp.bfloat16), 0, 0, share=1 / 1000)


def _check_bf16(
    name: str, actual: Array, expected: Any, noise: float, rare: float, *, share: float
) -> None:
    steps = bf16_steps(actual, expected)
    wanted = expected.astype(np.float64)
    rms = np.sqrt(np.mean(np.square(wanted), axis=-1, keepdims=True))
    distance = np.abs(np.asarray(actual).astype(np.float64) - wanted)
    differing, noisy, far = (
        np.count_nonzero(steps),
        np.count_nonzero((steps > 1) & ~(distance <= noise * rms)),
        np.count_nonzero((steps > 1) & ~(distance <= rare * rms)),
    )
    allowed = max(RARE_PLACES, steps.size // RARE_SHARE)
    if far or noisy > allowed or differing > steps.size * share:
        raise AssertionError(
            f"of {steps.size} {name} values {differing} differ ({share:.1%} may), by more than 1"
            f" step {noisy} by more than {noise:.2%} of their row's RMS ({allowed} may) and {far}"
            f" by more than {rare:.2%} (none may)."
        )


def check_cache(actual: Array, expected: Oracle) -> None:
    """Checks the updated cache against the oracle.

    Stored values: at most one step of their type, or, as BF16 and where a rotation cancels, 2**-18
    of the RMS of the values they come from; at most 0.1 % of places differ. NaN of e4m3 is 0x7F;
    scales of tiles are equal. Other rows: the same bits.

    Raises:
        AssertionError: they are further away; the text counts the places.
    """
    changed = bytes_of(actual)[~expected.written] != bytes_of(expected.cache)[~expected.written]
    stored = np.asarray(actual)[expected.written]
    steps, negative_nan = _row_steps(stored, expected.cache[expected.written], expected)
    differing, far = np.count_nonzero(steps), np.count_nonzero(steps > 1)
    if changed.any() or far or negative_nan or differing > steps.size / 1000:
        raise AssertionError(
            f"of {steps.size} stored cache values {differing} differ (0.1 % may), {far} by more"
            f" than 1 step, {negative_nan} bytes are 0xFF (none may); {changed.sum()} bytes"
            " of other rows changed (none may)."
        )


def _row_steps(actual: Any, wanted: Any, expected: Oracle) -> tuple[Steps, int]:
    """Steps between stored rows [N, columns], and how many e4m3 bytes are a negative NaN."""
    form = expected.form
    if form.cache == BF16:
        return _bf16_row_steps(actual, wanted), 0
    if form.cache == FP8_DS_MLA:
        latent, rope = form.geometry.kv_rank, -2 * form.geometry.rope
        quantized = e4m3_steps(actual[:, :latent], wanted[:, :latent])
        scales = 255 * (actual[:, latent:rope] != wanted[:, latent:rope])
        rotated = (x[:, rope:].copy().view(jnp.bfloat16) for x in (actual, wanted))
        steps = np.concatenate([quantized, scales, _bf16_row_steps(*rotated)], axis=1)
        return steps, int(np.count_nonzero(actual[:, :latent] == 0xFF))
    return e4m3_steps(actual, wanted), int(np.count_nonzero(bytes_of(actual) == 0xFF))


def _bf16_row_steps(actual: Any, wanted: Any) -> Steps:
    """Steps between rows, one at most where they are as close as FP32 is where terms cancel."""
    steps = bf16_steps(actual, wanted)
    a, b = (np.asarray(x).astype(np.float64) for x in (actual, wanted))
    rms = np.sqrt(np.mean(np.square(b), axis=1, keepdims=True))
    return np.where(np.abs(a - b) <= CANCELLED * rms, np.minimum(steps, 1), steps)
