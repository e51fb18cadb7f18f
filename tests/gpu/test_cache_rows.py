"""Which cache rows a call writes, and that it writes nothing else."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from kernel_calls import kernel_bytes

import jax_mla
from jax_mla.rules import ROW
from jax_mla.testing import Bytes, bytes_of, make_inputs

BATCHES = pytest.mark.parametrize("batch", [1, 5, 17, 70])


def rows_of(cache: Bytes) -> Bytes:
    return cache.reshape(-1, ROW)


def with_slots(inputs: dict[str, jax.Array], slots: npt.ArrayLike) -> dict[str, jax.Array]:
    return {**inputs, "slots": jnp.asarray(slots, jnp.int32)}


@BATCHES
def test_only_the_named_rows_change(batch: int) -> None:
    inputs = make_inputs(batch, 2, pages=7, page_size=480)
    [(_, cache)] = kernel_bytes([inputs])
    before, after = rows_of(bytes_of(inputs["cache"])), rows_of(cache)
    slots = np.asarray(inputs["slots"])
    untouched = np.delete(np.arange(len(before)), slots)
    assert np.array_equal(before[untouched], after[untouched])
    assert (before[slots] != after[slots]).any(axis=1).all()


@BATCHES
def test_a_slot_outside_the_cache_drops_the_row_and_keeps_the_query(batch: int) -> None:
    inputs = make_inputs(batch, 2, pages=7, page_size=480)
    rows = 7 * 480
    outside = np.resize(np.array([-1, rows, -(2**31), 2**31 - 1, rows + 1, -2]), batch)
    mixed = np.where(np.arange(batch) % 2, np.asarray(inputs["slots"]), outside)
    cases = [with_slots(inputs, slots) for slots in (inputs["slots"], outside, mixed)]
    (q, cache), (q_outside, cache_outside), (q_mixed, cache_mixed) = kernel_bytes(cases)
    assert np.array_equal(q, q_outside)
    assert np.array_equal(q, q_mixed)
    before = rows_of(bytes_of(inputs["cache"]))
    assert np.array_equal(rows_of(cache_outside), before)
    expected = before.copy()
    kept = mixed[1::2]
    expected[kept] = rows_of(cache)[kept]
    assert np.array_equal(rows_of(cache_mixed), expected)


@BATCHES
def test_the_last_of_the_tokens_that_name_a_slot_wins(batch: int) -> None:
    inputs = make_inputs(batch, 2, pages=7, page_size=480)
    unique = np.asarray(inputs["slots"])
    shared = unique[np.arange(batch) % max(1, batch // 3)]
    (_, cache), (_, cache_shared) = kernel_bytes([inputs, with_slots(inputs, shared)])
    expected = rows_of(bytes_of(inputs["cache"])).copy()
    for token in range(batch):
        expected[shared[token]] = rows_of(cache)[unique[token]]
    assert np.array_equal(rows_of(cache_shared), expected)


@BATCHES
def test_a_cache_without_pages_still_gives_queries(batch: int) -> None:
    inputs = make_inputs(batch, 2, pages=7, page_size=480)
    [(expected, _)] = kernel_bytes([inputs])
    no_pages = inputs.pop("cache")[:0]

    def call(cache: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax_mla.q_absorb(cache=cache, **inputs, implementation="cuda")

    for donated in ((), (0,)):
        q, cache = jax.jit(call, donate_argnums=donated)(no_pages)
        assert np.array_equal(bytes_of(q), expected)
        assert cache.shape == (0, 480, ROW)


def test_rows_beyond_four_gibibytes() -> None:
    """Byte offsets need 33 bits; a 32-bit product would write rows that the fill then shows."""
    page_size = 480
    pages = 2**32 // (page_size * ROW) + 9
    rows = pages * page_size
    first_beyond = -(-(2**32) // ROW)
    slots = [0, rows - 1, first_beyond, 2**31 // ROW + 1, first_beyond + page_size]
    inputs = make_inputs(len(slots), 2, pages=1, page_size=page_size)
    small = with_slots(inputs, np.arange(len(slots)))
    [(_, expected)] = kernel_bytes([small])

    def fill() -> jax.Array:
        index = [jax.lax.broadcasted_iota(jnp.uint32, (pages, page_size, ROW), i) for i in range(3)]
        value = index[0] * jnp.uint32(101) + index[1] * jnp.uint32(7) + index[2] * jnp.uint32(13)
        return jax.lax.bitcast_convert_type(value.astype(jnp.uint8), jnp.float8_e4m3fn)

    def call(cache: jax.Array) -> jax.Array:
        arguments: dict[str, Any] = {**with_slots(inputs, slots), "cache": cache}
        updated: jax.Array = jax_mla.q_absorb(**arguments, implementation="cuda")[1]
        return updated

    def changed_rows(cache: jax.Array) -> jax.Array:
        changed = (jax.lax.bitcast_convert_type(cache, jnp.uint8) != fill_bytes()).any(axis=-1)
        return jnp.nonzero(changed.reshape(-1), size=2 * len(slots), fill_value=-1)[0]

    def fill_bytes() -> jax.Array:
        return jax.lax.bitcast_convert_type(fill(), jnp.uint8)

    cache = jax.jit(call, donate_argnums=0)(jax.jit(fill)())
    written = [cache[slot // page_size, slot % page_size] for slot in slots]
    assert np.array_equal(
        np.stack([bytes_of(row) for row in written]), rows_of(expected)[: len(slots)]
    )
    found = np.asarray(jax.jit(changed_rows)(cache))
    assert sorted(found[found >= 0]) == sorted(slots)
