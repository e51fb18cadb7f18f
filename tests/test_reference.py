"""The reference against float64, and the rules about rows, slots and NaN."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_mla
from jax_mla import reference, testing
from jax_mla.testing import Bytes, bytes_of


def rows_of(cache: Any) -> Bytes:
    return bytes_of(cache).reshape(-1, 576)


def absorb(inputs: dict[str, Any], **options: Any) -> tuple[jax.Array, jax.Array]:
    return jax_mla.q_absorb(**inputs, implementation="reference", **options)


@pytest.mark.parametrize(
    ("batch", "heads", "options"),
    [
        (1, 1, {}),
        (2, 6, {}),  # the smallest batched product
        (5, 2, {"q_scale": 0.02, "k_scale": 0.3}),  # scales that are no powers of two
        (9, 12, {"q_scale": 0.001, "k_scale": 0.001}),  # many values saturate
        (33, 16, {"eps": 0.5}),
        (257, 3, {"eps": 0.0, "q_scale": 2.0**-9}),
    ],
)
def test_it_agrees_with_float64(batch: int, heads: int, options: dict[str, Any]) -> None:
    inputs = testing.make_inputs(batch, heads, seed=batch)
    expected = testing.oracle(inputs, **options)
    q, cache = absorb(inputs, **options)
    testing.check_query(q, expected)
    testing.check_cache(cache, expected)


def test_it_rounds_to_bf16_where_it_says() -> None:
    inputs = testing.make_inputs(16, 4)
    x, weight = inputs["qkv"][:, :1536].astype(jnp.float32), inputs["q_norm"]
    normed = jax.jit(reference.rms_norm, static_argnums=2)(x, weight, 1e-6)
    parts = jax.jit(reference.absorbed_query)(normed, inputs["w_qb"], inputs["w_uk"])
    query = np.concatenate(parts, axis=2)
    for rounded in (normed, query):
        np.testing.assert_array_equal(
            rounded, np.asarray(rounded).astype(jnp.bfloat16).astype(np.float32)
        )
    values = testing.oracle(inputs).values
    assert np.mean(np.asarray(query) != values) < 0.005


@pytest.mark.parametrize("columns", [2113, 2120, 3648])
def test_further_columns_are_ignored(columns: int) -> None:
    inputs = testing.make_inputs(3, 2)
    wide = jnp.full((3, columns), jnp.nan, jnp.bfloat16).at[:, :2112].set(inputs["qkv"])
    for got, expected in zip(absorb(inputs | {"qkv": wide}), absorb(inputs), strict=True):
        np.testing.assert_array_equal(bytes_of(got), bytes_of(expected))


@pytest.mark.parametrize(("pages", "page_size"), [(1, 480), (3, 480), (31, 1), (7, 3)])
def test_any_page_size(pages: int, page_size: int) -> None:
    inputs = testing.make_inputs(7, 1, pages=pages, page_size=page_size)
    testing.check_cache(absorb(inputs)[1], testing.oracle(inputs))


def test_slots_outside_of_the_cache_store_nothing_and_give_queries() -> None:
    inputs = testing.make_inputs(6, 2, pages=2, page_size=4)
    all_stored, _ = absorb(inputs)
    slots = jnp.array([-1, 3, 8, -(2**31), 2**31 - 1, -8], jnp.int32)
    q, cache = absorb(inputs | {"slots": slots})
    np.testing.assert_array_equal(bytes_of(q), bytes_of(all_stored))
    changed = (rows_of(cache) != rows_of(inputs["cache"])).any(axis=1)
    assert changed.tolist() == [False, False, False, True, False, False, False, False]


def test_the_last_of_equal_slots_wins_whole() -> None:
    inputs = testing.make_inputs(300, 1, page_size=4)
    slots = np.random.default_rng(0).integers(-1, 16, 300, np.int32)
    _, cache = absorb(inputs | {"slots": jnp.asarray(slots)})
    last = {int(slot): token for token, slot in enumerate(slots)}
    winners = np.full(300, -1, np.int32)
    for slot, token in last.items():
        winners[token] = slot
    _, expected = absorb(inputs | {"slots": jnp.asarray(winners)})
    assert len(last) == 17
    np.testing.assert_array_equal(bytes_of(cache), bytes_of(expected))


@pytest.mark.parametrize("page_size", [1, 480])
def test_a_cache_without_pages_still_gives_queries(page_size: int) -> None:
    inputs = testing.make_inputs(2, 1, page_size=page_size)
    expected, _ = absorb(inputs)
    q, cache = absorb(inputs | {"cache": inputs["cache"][:0]})
    np.testing.assert_array_equal(bytes_of(q), bytes_of(expected))
    assert cache.shape == (0, page_size, 576)


def test_nan_bytes_of_other_rows_stay() -> None:
    inputs = testing.make_inputs(2, 1, pages=1, page_size=4)
    cached = np.full((1, 4, 576), 0xFF, np.uint8)
    slots = jnp.array([2, -1], jnp.int32)
    cache = jnp.asarray(cached.view(jnp.float8_e4m3fn))
    _, updated = absorb(inputs | {"cache": cache, "slots": slots})
    assert [set(row) == {0xFF} for row in rows_of(updated)] == [True, True, False, True]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_nan_row_changes_no_other_row(bad: float) -> None:
    inputs = testing.make_inputs(5, 3)
    expected_q, expected_cache = absorb(inputs)
    q, cache = absorb(inputs | {"qkv": inputs["qkv"].at[2].set(bad)})
    slots = np.asarray(inputs["slots"])
    others = np.arange(5) != 2
    np.testing.assert_array_equal(bytes_of(q)[others], bytes_of(expected_q)[others])
    assert (bytes_of(q)[2] == 0x7F).all()
    untouched = np.delete(rows_of(cache), slots[2], axis=0)
    np.testing.assert_array_equal(untouched, np.delete(rows_of(expected_cache), slots[2], axis=0))
    assert (rows_of(cache)[slots[2], :512] == 0x7F).all()


def test_a_nan_in_one_latent_leaves_the_others() -> None:
    inputs = testing.make_inputs(1, 1)
    expected_q, expected_cache = absorb(inputs)
    q, cache = absorb(inputs | {"qkv": inputs["qkv"].at[0, 1536].set(jnp.nan)})
    slot = int(inputs["slots"][0])
    np.testing.assert_array_equal(bytes_of(q), bytes_of(expected_q))
    assert (rows_of(cache)[slot, :512] == 0x7F).all()
    np.testing.assert_array_equal(rows_of(cache)[slot, 512:], rows_of(expected_cache)[slot, 512:])


def test_a_zero_row_is_zero_unless_eps_is() -> None:
    inputs = testing.make_inputs(1, 1)
    inputs["qkv"] = jnp.zeros_like(inputs["qkv"])
    assert set((bytes_of(absorb(inputs)[0]) & 0x7F).ravel()) == {0}
    assert set(bytes_of(absorb(inputs, eps=0.0)[0]).ravel()) == {0x7F}


def test_no_tokens_change_nothing() -> None:
    inputs = testing.make_inputs(0, 2)
    q, cache = absorb(inputs)
    assert q.shape == (0, 2, 576)
    np.testing.assert_array_equal(bytes_of(cache), bytes_of(inputs["cache"]))


def test_a_cache_without_pages_stores_nothing() -> None:
    inputs = testing.make_inputs(2, 1)
    expected, _ = absorb(inputs)
    q, cache = absorb(inputs | {"cache": inputs["cache"][:0]})
    assert cache.shape == (0, 64, 576)
    np.testing.assert_array_equal(bytes_of(q), bytes_of(expected))


def test_inputs_need_a_row_for_each_token() -> None:
    with pytest.raises(ValueError, match=r"at least batch = 9, got 2 \* 4"):
        testing.make_inputs(9, 1, pages=2, page_size=4)
