"""The kernels' bytes without a GPU: their PTX, run on the CPU, against the float64 oracle.

JAX_MLA_PTX names the folder that the build's jax_mla/aot.py has written. Without it nothing here
runs; with it nothing is skipped.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated_calls import Kernel, built_kernel, emulated_results
from ptx_machine import PtxError

from jax_mla.formats import CACHE_FORMATS, STYLES
from jax_mla.rules import QKV_COLUMNS
from jax_mla.testing import (
    bytes_of,
    check_cache,
    check_q_latent,
    check_query,
    make_inputs,
    oracle,
)
from jax_mla.variants import ARCHS, PLAIN_VARIANTS, SHIPPED

FOLDER = os.environ.get("JAX_MLA_PTX")

pytestmark = pytest.mark.skipif(not FOLDER, reason="JAX_MLA_PTX names no folder with PTX")

PAGES, PAGE_SIZE = 3, 61
# Near the RMS of the values, 1, as in the tests on a GPU.
SCALES: dict[str, Any] = {"q_scale": 0.8, "k_scale": 0.9}
KEYS = [variant.key for variant in PLAIN_VARIANTS]
GENERAL = [variant.key for variant in SHIPPED["sm_90a"] if variant.form != "plain"]
SMALL = ("small_c8_t1", "small_c16_t1")


@functools.cache
def kernel(key: str, arch: str = "sm_90a") -> Kernel:
    assert FOLDER
    return built_kernel(Path(FOLDER), key, arch)


def inputs_of(batch: int, heads: int, **options: Any) -> dict[str, jax.Array]:
    return make_inputs(batch, heads, pages=PAGES, page_size=PAGE_SIZE, seed=batch, **options)


def check(key: str, inputs: dict[str, jax.Array]) -> None:
    q, cache = emulated_results(kernel(key), inputs, **SCALES)
    expected = oracle(inputs, **SCALES)
    check_query(q, expected)
    check_cache(cache, expected)


@pytest.mark.parametrize("key", KEYS)
def test_two_heads_and_a_tile_that_is_not_full(key: str) -> None:
    tokens = kernel(key).tokens
    check(key, inputs_of(2 if tokens == 1 else tokens + 3, 2))


@pytest.mark.parametrize("key", KEYS)
def test_slots_that_drop_or_share_rows_wide_rows_and_nan(key: str) -> None:
    batch, rows = (3 if key in SMALL else 7), PAGES * PAGE_SIZE
    inputs = inputs_of(batch, 1, columns=QKV_COLUMNS + 1536)
    inputs["qkv"] = inputs["qkv"].at[1, 5].set(jnp.nan)  # the query alone: the cache row stays
    slots = np.array([rows - 1, rows, rows - 1, -1, 2**31 - 1, -(2**31), 0])
    inputs["slots"] = jnp.asarray(slots[:batch], jnp.int32)
    check(key, inputs)


@pytest.mark.parametrize("key", ["small_c8_t1", "tiled_c4_t16", "resident_c1_t64"])
def test_a_cache_without_pages(key: str) -> None:
    inputs = inputs_of(2, 1)
    q, _ = emulated_results(kernel(key), inputs)
    empty, cache = emulated_results(kernel(key), {**inputs, "cache": inputs["cache"][:0]})
    assert np.array_equal(bytes_of(q), bytes_of(empty))
    assert cache.size == 0


def check_form(key: str, inputs: dict[str, Any], q_dtype: str, *, q_latent: bool) -> None:
    scales = {"q_scale": 0.8} if q_dtype == "float8_e4m3fn" else {}
    scales |= {"k_scale": 0.9} if inputs["cache"].dtype == jnp.float8_e4m3fn else {}
    expected = oracle(inputs, q_dtype=q_dtype, **scales)
    q, cache, *latent = emulated_results(
        kernel(key), inputs, q_dtype=q_dtype, return_q_norm=q_latent, **scales
    )
    check_query(q, expected)
    check_cache(cache, expected)
    for found in latent:
        check_q_latent(found, expected)


@pytest.mark.parametrize("key", GENERAL)
def test_general_forms_rotate_and_store_as_they_are_asked(key: str) -> None:
    """Each option with each other one would take long: styles, formats and latents take turns."""
    q_dtype = "bfloat16" if key.endswith("bf16") else "float8_e4m3fn"
    formats = [stored for stored in CACHE_FORMATS if q_dtype in stored.q_dtypes]
    tokens = kernel(key).tokens
    batch = 2 if tokens == 1 else tokens // 2 + 1
    for i, (style, stored) in enumerate(itertools.zip_longest(STYLES, formats)):
        chosen = (stored or formats[0]).name
        check_form(key, inputs_of(batch, 1, rope=style, cache=chosen), q_dtype, q_latent=i == 0)


@pytest.mark.parametrize("cache", [stored.name for stored in CACHE_FORMATS])
@pytest.mark.parametrize("style", [None, "half"])
@pytest.mark.parametrize("key", ["small_c8_t1", "tiled_c2_t16", "resident_c1_t64"])
def test_every_style_goes_with_every_format(key: str, style: str | None, cache: str) -> None:
    inputs = inputs_of(3, 2, rope=style, cache=cache)
    check_form(f"{key}_bf16", inputs, "bfloat16", q_latent=True)
    if cache == "e4m3":
        check_form(f"{key}_fp8", inputs, "float8_e4m3fn", q_latent=True)


@pytest.mark.parametrize(
    ("key", "stored", "q_dtype"),
    [
        ("tiled_c8_t8_fp8", "e4m3", "float8_e4m3fn"),
        ("tiled_c2_t16_bf16", "fp8_ds_mla", "bfloat16"),
        ("resident_c1_t64_bf16", "bf16", "bfloat16"),
        ("resident_c1_t64_fp8", "e4m3", "float8_e4m3fn"),
    ],
)
def test_tiles_after_the_first_find_their_positions(key: str, stored: str, q_dtype: str) -> None:
    inputs = inputs_of(kernel(key).tokens + 3, 2, rope="half", cache=stored)
    check_form(key, inputs, q_dtype, q_latent=True)


@pytest.mark.parametrize("cache", [stored.name for stored in CACHE_FORMATS])
def test_rows_of_general_forms_are_dropped_and_shared_alike(cache: str) -> None:
    inputs = inputs_of(7, 1, rope="half", cache=cache, columns=QKV_COLUMNS + 8)
    inputs["qkv"] = inputs["qkv"].at[1, 5].set(jnp.nan).at[4, 1600].set(jnp.inf)
    rows = PAGES * PAGE_SIZE
    slots = np.array([rows - 1, rows, rows - 1, -1, 2, -(2**31), 0])
    inputs["slots"] = jnp.asarray(slots, jnp.int32)
    for key in ("small_c16_t1_bf16", "tiled_c8_t8_bf16"):
        check_form(key, inputs, "bfloat16", q_latent=False)


@pytest.mark.parametrize("arch", sorted({*ARCHS} - {"sm_90a"}))
@pytest.mark.parametrize("key", ["small_c8_t1", "tiled_c8_t8", "tiled_c2_t32", "resident_c1_t64"])
def test_every_arch_gives_the_same_bits(key: str, arch: str) -> None:
    inputs = inputs_of(2, 1)
    results = [emulated_results(kernel(key, arch), inputs, **SCALES) for arch in ("sm_90a", arch)]
    for one, other in zip(*results, strict=True):
        assert np.array_equal(bytes_of(one), bytes_of(other))


SYNCHRONISATION = {
    "block barrier": r"bar\.sync\s+0;",
    "arrival at the cluster's barrier": r"barrier\.cluster\.arrive\.relaxed;",
    "wait for the cluster": r"barrier\.cluster\.wait;",
    "fence after mbarrier.init": r"fence\.mbarrier_init\.release\.cluster;",
    "commit of copies": r"cp\.async\.commit_group;",
    "wait for copies": r"cp\.async\.wait_group\s+0;",
    "announcement of bytes": r"mbarrier\.arrive\.expect_tx[^;]*;",
    "loop around a wait": r"bra\.uni\s+LAB_WAIT;",
}
"""What orders the threads, except barriers of a warp: the machine takes a warp's for ordered."""


@pytest.mark.parametrize("part", SYNCHRONISATION)
@pytest.mark.parametrize("key", ["small_c8_t1", "tiled_c8_t8"])
def test_no_synchronisation_is_one_too_many(key: str, part: str) -> None:
    """Also a test of the machine: it finds every one that is missing."""
    whole = kernel(key)
    found = list(re.finditer(SYNCHRONISATION[part], whole.text))
    assert found
    inputs = inputs_of(whole.tokens, 1)
    for place in found:
        text = whole.text[: place.start()] + whole.text[place.end() :]
        with pytest.raises(PtxError):
            emulated_results(dataclasses.replace(whole, text=text), inputs)


def test_a_buffer_that_is_too_short_is_noticed() -> None:
    inputs = inputs_of(1, 1)
    with pytest.raises(PtxError, match="outside of every buffer: w_uk of 65536 bytes"):
        emulated_results(kernel("small_c8_t1"), {**inputs, "w_uk": inputs["w_uk"][:, :64]})


def test_inputs_stay_as_they_are() -> None:
    inputs = inputs_of(1, 1)
    before = {name: np.array(array) for name, array in inputs.items()}
    emulated_results(kernel("small_c8_t1"), inputs)
    for name, array in inputs.items():
        assert np.array_equal(bytes_of(array), bytes_of(before[name])), name
