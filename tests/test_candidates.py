"""Kernels that compile but that no GPU has run: what a launch of them must know, and no spills.

JAX_MLA_CANDIDATES names the folder that `jax_mla/aot.py --candidates` has written. Without it only
what needs no compiler is tested.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from build_modules import build_module

import jax_mla
from jax_mla.formats import STYLES
from jax_mla.rules import ROPE
from jax_mla.variants import CANDIDATES, SHIPPED, THREADS

FOLDER = os.environ.get("JAX_MLA_CANDIDATES")
KEYS = [variant.key for variant in CANDIDATES]
SM_SHARED_BYTES = 233_472
SM_REGISTERS = 65_536

needs_candidates = pytest.mark.skipif(
    not FOLDER, reason="JAX_MLA_CANDIDATES names no folder with kernels"
)
sass = build_module("sass")
pair_order = build_module("kernels/pair_order")


def entries(folder: Path) -> dict[str, dict[str, Any]]:
    """Manifest entries for sm_90a by key."""
    kernels = json.loads((folder / "manifest.json").read_text())["kernels"]
    return {entry["key"]: entry for entry in kernels if entry["arch"] == "sm_90a"}


def candidate(key: str) -> tuple[Path, dict[str, Any]]:
    """A candidate's cubin and manifest entry."""
    assert FOLDER
    entry = entries(Path(FOLDER))[key]
    return Path(FOLDER) / entry["file"], entry


def columns(style: int) -> np.ndarray[Any, Any]:
    """Columns in pair order."""
    positions = np.arange(ROPE)
    return np.asarray(pair_order.column(positions // 2, positions % 2, style))


@pytest.mark.parametrize("style", [pair_order.NONE, *range(1, len(STYLES) + 1)])
@pytest.mark.parametrize("cluster", sorted({variant.cluster for variant in SHIPPED}))
def test_each_rope_column_is_taken_once_and_its_pair_by_the_same_cta(
    cluster: int, style: int
) -> None:
    owned = columns(style).reshape(cluster, ROPE // cluster)
    assert np.array_equal(np.sort(owned, axis=None), np.arange(ROPE))
    partner = np.arange(ROPE).reshape(2, -1)[::-1].ravel() if style == 2 else np.arange(ROPE) ^ 1
    assert np.array_equal(np.sort(partner[owned]), np.sort(owned))


@pytest.mark.parametrize("style", range(1, len(STYLES) + 1))
def test_a_fragments_neighbours_are_the_elements_of_a_pair(style: int) -> None:
    pairs = np.arange(ROPE // 2)
    expected = {
        "interleaved": (2 * pairs, 2 * pairs + 1),
        "half": (pairs, pairs + ROPE // 2),
    }[STYLES[style - 1]]
    assert np.array_equal(columns(style).reshape(-1, 2).T, expected)


def test_without_rope_columns_keep_their_order() -> None:
    assert np.array_equal(columns(pair_order.NONE), np.arange(ROPE))


def test_no_candidate_is_installed() -> None:
    installed = entries(Path(jax_mla.__path__[0]) / "cubins")
    assert not set(installed) & set(KEYS)
    assert {entry["form"] for entry in installed.values()} == {"plain"}


@needs_candidates
@pytest.mark.parametrize("key", KEYS)
def test_a_candidate_is_what_the_manifest_says(key: str) -> None:
    cubin, entry = candidate(key)
    assert hashlib.sha256(cubin.read_bytes()).hexdigest() == entry["sha256"]
    report = sass.lint(cubin)  # raises on spills, local memory and undefined uniform registers
    assert report.registers == entry["registers"] <= SM_REGISTERS // THREADS
    # The plain form's, then three pointers and three int32: jax_mla/kernels/options.py.
    assert report.params == entry["params"]
    assert [param["size"] for param in entry["params"]] == [8] * 12 + [4] * 2 + [8] * 3 + [4] * 3
    assert [param["offset"] for param in entry["params"]] == [
        *range(0, 97, 8), 100, 104, 112, 120, 128, 132, 136,
    ]  # fmt: skip
    assert entry["symbol"].encode() in cubin.read_bytes()
    assert key.endswith(f"_{entry['form']}")


@needs_candidates
@pytest.mark.parametrize("key", KEYS)
def test_a_candidate_is_launched_like_its_plain_form(key: str) -> None:
    _, entry = candidate(key)
    plain = entries(Path(jax_mla.__path__[0]) / "cubins")[key.rpartition("_")[0]]
    for field in ("block", "cluster", "tokens", "shared_memory", "carveout"):
        assert entry[field] == plain[field]


@needs_candidates
@pytest.mark.parametrize("kernel", ["small_c8_t1", "small_c16_t1", "tiled_c8_t8"])
@pytest.mark.parametrize("form", ["fp8", "bf16"])
def test_two_ctas_fit_an_sm_where_the_choice_counts_on_it(kernel: str, form: str) -> None:
    _, entry = candidate(f"{kernel}_{form}")
    assert 2 * (entry["shared_memory"] + 1024) <= SM_SHARED_BYTES
    assert 2 * THREADS * entry["registers"] <= SM_REGISTERS


@functools.cache
def matrix_span(path: Path) -> tuple[int, int]:
    """MMAs of a kernel, and register moves between the first and the last one."""
    names = [opcode for opcode, _ in sass.instructions(sass.disassemble(path))]
    at = [i for i, name in enumerate(names) if name.startswith("HMMA")]
    moves = [name for name in names[at[0] : at[-1]] if name.startswith(("MOV", "IMAD.MOV"))]
    return len(at), len(moves)


@needs_candidates
@pytest.mark.parametrize("key", [key for key in KEYS if not key.startswith("small")])
def test_mmas_take_their_operands_where_they_lie(key: str) -> None:
    """A store of fragments once made the compiler move every operand of every MMA."""
    path, _ = candidate(key)
    plain = Path(jax_mla.__path__[0]) / "cubins" / "sm_90a" / f"{key.rpartition('_')[0]}.cubin"
    (mmas, moves), (plain_mmas, plain_moves) = matrix_span(path), matrix_span(plain)
    assert mmas >= plain_mmas
    assert moves <= plain_moves + mmas / 4
