"""Bytes of the kernels against the float64 oracle, over the table of shapes.

Tokens do not depend on each other, so for each head count one oracle of the largest batch judges
every batch, and one program makes every call.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from kernel_calls import kernel_results, take
from shapes import CHECKED_BATCHES, CHECKED_HEADS

import jax_mla
from jax_mla import variants
from jax_mla.testing import Oracle, bytes_of, check_cache, check_query, make_inputs, oracle

PAGES, PAGE_SIZE = 7, 61
# Near the RMS of the values, 1: a much smaller scale would resolve what cancellation leaves of
# small values, in which FP32 and float64 differ by many steps.
SCALES: dict[str, Any] = {"q_scale": 0.8, "k_scale": 0.9}


def oracle_of(inputs: dict[str, jax.Array], whole: Oracle, batch: int) -> Oracle:
    """The part of the oracle of all tokens that is about the first `batch`."""
    slots = np.asarray(inputs["slots"])[:batch]
    written = np.isin(np.arange(PAGES * PAGE_SIZE), slots).reshape(PAGES, PAGE_SIZE)
    cache = np.where(written[..., None], bytes_of(whole.cache), bytes_of(inputs["cache"]))
    return dataclasses.replace(
        whole,
        query=whole.query[:batch],
        values=whole.values[:batch],
        cache=cache.view(whole.cache.dtype),
        written=written,
    )


def check_batches(heads: int, batches: tuple[int, ...], variant: str | None = None) -> None:
    inputs = make_inputs(max(batches), heads, pages=PAGES, page_size=PAGE_SIZE, seed=heads)
    cases = [take(inputs, batch) for batch in batches]
    results = kernel_results(cases, variant, **SCALES)
    whole = oracle(inputs, **SCALES)
    for batch, (q, cache) in zip(batches, results, strict=True):
        expected = oracle_of(inputs, whole, batch)
        try:
            check_query(q, expected)
            check_cache(cache, expected)
        except AssertionError as error:
            raise AssertionError(f"heads {heads}, batch {batch}: {error}") from error


@pytest.mark.parametrize("heads", CHECKED_HEADS)
def test_bytes_at_every_batch(heads: int) -> None:
    check_batches(heads, CHECKED_BATCHES)


@pytest.mark.parametrize("heads", [1, 12])
@pytest.mark.parametrize("key", [variant.key for variant in variants.PLAIN_VARIANTS])
def test_every_variant_serves_every_batch(key: str, heads: int) -> None:
    """Also where another one is chosen: each takes any batch, in tiles of its own size."""
    check_batches(heads, (1, 2, 3, 7, 8, 9, 16, 17, 33, 65, 130), key)


@pytest.mark.parametrize(("heads", "batch"), [(6, 1), (12, 8), (16, 33), (64, 64)])
def test_the_kernel_is_as_close_to_the_oracle_as_the_reference(heads: int, batch: int) -> None:
    inputs = make_inputs(batch, heads, pages=PAGES, page_size=PAGE_SIZE)
    [(kernel, _)] = kernel_results([inputs], **SCALES)
    call = jax.jit(lambda **x: jax_mla.q_absorb(**x, **SCALES, implementation="reference"))
    reference, _ = call(**inputs)
    expected = oracle(inputs, **SCALES).values

    def error(q: jax.Array) -> float:
        return float(np.sqrt(np.mean(np.square(np.asarray(q, np.float64) - expected))))

    # Both are dominated by the rounding to e4m3, which is the same.
    assert error(kernel) <= 1.001 * error(reference)
