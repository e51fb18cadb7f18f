"""Bytes of the general kernels: RoPE, BF16 queries, cache formats, the query latent."""

from typing import Any

import jax
import numpy as np
import pytest
from kernel_calls import kernel_bytes, kernel_results, take
from shapes import CHECKED_HEADS

import jax_mla
from jax_mla import testing, variants
from jax_mla.formats import CACHE_FORMATS, STYLES
from jax_mla.testing import make_inputs

PAGES, PAGE_SIZE = 5, 37
BATCHES = (1, 2, 8, 11, 33, 67)
KEYS = [variant.key for variant in variants.PLAIN_VARIANTS]
FORMATS = [(stored.name, q_dtype) for stored in CACHE_FORMATS for q_dtype in stored.q_dtypes]


def check(heads: int, variant: str | None, style: str | None, cache: str, q_dtype: str) -> None:
    inputs = make_inputs(
        max(BATCHES), heads, pages=PAGES, page_size=PAGE_SIZE, rope=style, cache=cache, seed=heads
    )
    scales = {"q_scale": 0.8} if q_dtype != "bfloat16" else {}
    scales |= {"k_scale": 0.9} if cache == "e4m3" else {}
    cases = [take(inputs, batch) for batch in BATCHES]
    results = kernel_results(cases, variant, q_dtype=q_dtype, return_q_norm=True, **scales)
    for batch, case, (q, stored, latent) in zip(BATCHES, cases, results, strict=True):
        expected = testing.oracle(case, q_dtype=q_dtype, **scales)
        try:
            testing.check_query(q, expected)
            testing.check_cache(stored, expected)
            testing.check_q_latent(latent, expected)
        except AssertionError as error:
            raise AssertionError(f"batch {batch}: {error}") from error


@pytest.mark.parametrize(("cache", "q_dtype"), FORMATS)
@pytest.mark.parametrize("style", [None, *STYLES])
@pytest.mark.parametrize("key", KEYS)
def test_every_variant_serves_every_form(
    key: str, style: str | None, cache: str, q_dtype: str
) -> None:
    check(2, key, style, cache, q_dtype)


@pytest.mark.parametrize("heads", CHECKED_HEADS)
@pytest.mark.parametrize(
    ("style", "cache", "q_dtype"),
    [
        ("interleaved", "e4m3", "float8_e4m3fn"),  # DeepSeek, Kimi-K2, LongCat
        ("interleaved", "fp8_ds_mla", "bfloat16"),
        ("half", "bf16", "bfloat16"),
    ],
)
def test_the_chosen_variant_at_many_head_counts(
    heads: int, style: str, cache: str, q_dtype: str
) -> None:
    check(heads, None, style, cache, q_dtype)


@pytest.mark.parametrize("batch", [1, 8, 33, 65])
def test_without_options_the_general_form_gives_the_plain_bits(batch: int) -> None:
    """The query latent alone takes the form "fp8", which then does what "plain" does."""
    inputs = make_inputs(batch, 6, pages=PAGES, page_size=PAGE_SIZE)
    [plain] = kernel_bytes([inputs])
    [(q, cache, _)] = kernel_bytes([inputs], return_q_norm=True)
    assert np.array_equal(q, plain[0])
    assert np.array_equal(cache, plain[1])


@pytest.mark.parametrize("style", STYLES)
def test_command_buffers_read_new_positions(style: str) -> None:
    steps = [
        make_inputs(9, 6, pages=PAGES, page_size=PAGE_SIZE, rope=style, seed=s) for s in (0, 1)
    ]

    def layers(given: dict[str, Any]) -> Any:
        queries, cache = [], given["cache"]
        for _ in range(8):
            q, cache = jax_mla.q_absorb(**(given | {"cache": cache}), implementation="cuda")
            queries.append(q)
        return queries[-1], cache

    program = jax.jit(layers).lower(steps[0]).compile({"xla_gpu_graph_min_graph_size": "1"})
    for turn in (0, 1, 0):
        expected = testing.oracle(steps[turn])
        q, cache = program(steps[turn])
        testing.check_query(q, expected)
        testing.check_cache(cache, expected)
