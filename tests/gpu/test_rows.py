"""Rows of qkv: wider than needed, and with NaN or Inf in one of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_calls import kernel_bytes

import jax_mla
from jax_mla.rules import QKV_COLUMNS
from jax_mla.testing import bytes_of, make_inputs


@pytest.mark.parametrize("batch", [1, 9, 33])
@pytest.mark.parametrize("columns", [2113, 2120, 3648])
def test_further_columns_are_ignored(batch: int, columns: int) -> None:
    """3648 is a merged gate, read in place; 2113 makes rows unaligned, so they are copied first."""
    inputs = make_inputs(batch, 6, pages=3, page_size=16)
    beyond = jnp.full((batch, columns - QKV_COLUMNS), jnp.nan, jnp.bfloat16)
    wide = {**inputs, "qkv": jnp.concatenate([inputs["qkv"], beyond], axis=1)}
    (q, cache), (q_wide, cache_wide) = kernel_bytes([inputs, wide])
    assert np.array_equal(q, q_wide)
    assert np.array_equal(cache, cache_wide)


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("batch", [2, 17, 65])
def test_a_nan_row_changes_no_other_row(batch: int, value: float) -> None:
    inputs = make_inputs(batch, 6, pages=5, page_size=16)
    bad = batch // 2
    spoiled = {**inputs, "qkv": inputs["qkv"].at[bad].set(value)}
    (q, cache), (q_spoiled, cache_spoiled) = kernel_bytes([inputs, spoiled])
    others = np.delete(np.arange(batch), bad)
    assert np.array_equal(q[others], q_spoiled[others])
    row = np.asarray(inputs["slots"])[bad]
    cache, cache_spoiled = (c.reshape(5 * 16, -1) for c in (cache, cache_spoiled))
    assert np.array_equal(np.delete(cache, row, axis=0), np.delete(cache_spoiled, row, axis=0))
    assert (q_spoiled[bad] == 0x7F).all()
    k_pe = 0x7E if value == np.inf else 0x7F
    assert (cache_spoiled[row, :512] == 0x7F).all()  # Inf * rsqrt(Inf) is NaN
    assert (cache_spoiled[row, 512:] == k_pe).all()


def test_no_tokens_launch_nothing_and_keep_the_cache() -> None:
    inputs = make_inputs(1, 6, pages=3, page_size=16)
    none = {**inputs, "qkv": inputs["qkv"][:0], "slots": inputs["slots"][:0]}
    call = functools.partial(jax_mla.q_absorb, implementation="cuda")
    q, cache = jax.jit(call)(**none)
    assert q.shape == (0, 6, 576)
    assert np.array_equal(bytes_of(cache), bytes_of(inputs["cache"]))
