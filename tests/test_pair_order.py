"""The order in which kernels take rope columns: every column once, pairs together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from build_modules import build_module

from jax_mla.formats import STYLES
from jax_mla.rules import ROPE
from jax_mla.variants import PLAIN_VARIANTS

pair_order = build_module("kernels/pair_order")


def columns(style: int) -> np.ndarray[Any, Any]:
    """Columns in pair order."""
    positions = np.arange(ROPE)
    return np.asarray(pair_order.column(positions // 2, positions % 2, style))


@pytest.mark.parametrize("style", [pair_order.NONE, *range(1, len(STYLES) + 1)])
@pytest.mark.parametrize("cluster", sorted({variant.cluster for variant in PLAIN_VARIANTS}))
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
