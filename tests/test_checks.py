"""The comparisons of jax_mla.testing fail on what they forbid."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_mla import reference, testing
from jax_mla.testing import bytes_of, make_inputs

BF16 = jnp.bfloat16


def corrupted(array: Any, place: tuple[Any, ...], steps: int) -> testing.Bytes:
    changed = bytes_of(array).copy()
    up = int(changed[place]) & 0x7F < 0x40
    changed[place] = int(changed[place]) + (steps if up else -steps)
    return changed


def test_the_query_check_fails_on_what_it_forbids() -> None:
    expected = testing.oracle(testing.make_inputs(2, 2), q_scale=0.25)
    values = np.abs(expected.values)
    large = np.unravel_index(values.argmax(), values.shape)
    small = np.unravel_index(values.argmin(), values.shape)
    testing.check_query(corrupted(expected.query, large, 1), expected)
    testing.check_query(corrupted(expected.query, small, 4), expected)
    flipped = bytes_of(expected.query).copy()
    flipped.ravel()[: flipped.size // 50] ^= 1
    for wrong in (
        corrupted(expected.query, large, 2),
        corrupted(expected.query, small, 40),
        flipped,
    ):
        with pytest.raises(AssertionError, match="query bytes"):
            testing.check_query(wrong, expected)


def test_the_cache_check_fails_on_what_it_forbids() -> None:
    expected = testing.oracle(testing.make_inputs(4, 1))
    stored, other = np.argwhere(expected.written)[0], np.argwhere(~expected.written)[0]
    testing.check_cache(corrupted(expected.cache, (*stored, 5), 1), expected)
    flipped = bytes_of(expected.cache).copy()
    flipped[tuple(stored)] ^= 1
    for wrong in (
        corrupted(expected.cache, (*stored, 5), 2),
        corrupted(expected.cache, (*other, 5), 1),
        flipped,
    ):
        with pytest.raises(AssertionError, match="cache values"):
            testing.check_cache(wrong, expected)


@pytest.mark.parametrize("q_dtype", ["float8_e4m3fn", "bfloat16"])
def test_the_check_finds_a_rotation_of_what_was_not_rounded(q_dtype: str) -> None:
    inputs = make_inputs(32, 2, rope="half")
    expected, rope = testing.oracle(inputs, q_dtype=q_dtype), inputs["rope"]
    exact = expected.q_latent @ np.asarray(inputs["w_qb"]).astype(np.float64).T
    q_pe = exact.reshape(32, 2, 192)[:, :, 128:].astype(np.float32)
    angles = rope.cos_sin[jnp.clip(rope.positions, 0, rope.cos_sin.shape[0] - 1)]
    turned = np.asarray(reference.rotate(jnp.asarray(q_pe), angles[:, None], rope.style))
    wrong = expected.query.copy()
    wrong[..., 512:] = turned.astype(wrong.dtype)
    with pytest.raises(AssertionError, match="rope columns"):
        testing.check_query(wrong, expected)


@pytest.mark.parametrize("style", [None, "half"])
def test_a_rotation_makes_more_query_bytes_small(style: str | None) -> None:
    expected = testing.oracle(make_inputs(4, 2, rope=style), q_scale=0.8)
    rms = np.sqrt(np.mean(np.square(expected.values), axis=2, keepdims=True))
    share, rope = np.abs(expected.values) / rms, np.arange(576) >= 512

    def place(low: float, high: float, columns: Any) -> tuple[Any, ...]:
        return tuple(np.argwhere((share > low) & (share < high) & columns)[0])

    between = place(1 / 16, 1 / 4, rope)
    testing.check_query(corrupted(expected.query, place(0, 1 / 16, rope), 4), expected)
    wrong = [(place(1 / 4, 2, rope), 2), (place(1 / 16, 1 / 4, ~rope), 2), (between, 5)]
    if style is None:
        wrong.append((between, 2))
    else:
        testing.check_query(corrupted(expected.query, between, 4), expected)
    for place_, steps in wrong:
        with pytest.raises(AssertionError, match="query bytes"):
            testing.check_query(corrupted(expected.query, place_, steps), expected)


@pytest.mark.parametrize(("batch", "rare"), [(4, 8), (88, 10)])
def test_few_bf16_query_values_may_be_off_by_more(batch: int, rare: int) -> None:
    expected = testing.oracle(make_inputs(batch, 2, rope="half"), q_dtype="bfloat16")
    rms = np.sqrt(np.mean(np.square(expected.values), axis=2, keepdims=True))
    smallest = np.argsort(np.abs(expected.values / rms), axis=None)

    def off(places: int, share: float) -> Any:
        """That many values, the smallest ones, moved by a share of their row's RMS."""
        wrong = expected.query.copy()
        changed = (expected.values + share * rms).astype(BF16)
        wrong.ravel()[smallest[:places]] = changed.ravel()[smallest[:places]]
        return wrong

    testing.check_query(off(30, 0.98 / 128), expected)
    testing.check_query(off(rare, 0.98 / 32), expected)
    for places, share in ((rare + 1, 1.02 / 128), (1, 1.02 / 32), (1, np.nan)):
        with pytest.raises(AssertionError, match="query values"):
            testing.check_query(off(places, share), expected)


def spoiled(array: Any, place: Any, by: int) -> Any:
    """A copy with the bits of one value moved."""
    changed = np.array(array)
    bits = changed.view({1: np.uint8, 2: np.uint16}[changed.dtype.itemsize])
    bits[place] = bits[place].astype(np.int32) + by
    return changed


def test_the_checks_fail_on_what_they_forbid_of_bf16_values() -> None:
    inputs = make_inputs(4, 2, rope="half", cache="bf16")
    expected = testing.oracle(inputs)
    latent = expected.q_latent.astype(BF16)
    largest = np.unravel_index(np.abs(expected.values).argmax(), expected.values.shape)
    row = tuple(np.argwhere(expected.written)[0])
    other = tuple(np.argwhere(~expected.written)[0])
    testing.check_query(spoiled(expected.query, largest, 1), expected)
    testing.check_q_latent(spoiled(latent, (0, 0), 1), expected)
    testing.check_cache(spoiled(expected.cache, (*row, 3), 1), expected)
    zeros = np.where(np.arange(576) % 8, expected.query.astype(np.float32), 0).astype(BF16)
    for check_, wrong in (
        (testing.check_query, spoiled(expected.query, largest, 3)),
        (testing.check_query, zeros),
        (testing.check_q_latent, spoiled(latent, (0, 0), 2)),
        (testing.check_q_latent, spoiled(latent, np.s_[0, :20], 1)),
        (testing.check_cache, spoiled(expected.cache, (*row, 3), 2)),
        (testing.check_cache, spoiled(expected.cache, (*other, 3), 1)),
        (testing.check_cache, spoiled(expected.cache, (*row, np.s_[:50]), 1)),
    ):
        with pytest.raises(AssertionError, match="differ"):
            check_(wrong, expected)


def test_the_check_fails_on_what_it_forbids_of_fp8_ds_mla_rows() -> None:
    expected = testing.oracle(make_inputs(4, 1, cache="fp8_ds_mla"))
    row = tuple(np.argwhere(expected.written)[0])
    latent = int(np.argmax(expected.cache[row][:512] & 0x7F))
    for column, by in ((latent, -2), (514, 1), (515, 1), (600, 4), (655, 1)):
        with pytest.raises(AssertionError, match="differ"):
            testing.check_cache(spoiled(expected.cache, (*row, column), by), expected)
