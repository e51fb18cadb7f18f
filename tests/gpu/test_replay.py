"""The same inputs give the same bits: again, eager, jitted, in a command buffer, and in turns."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest

import jax_mla
from jax_mla.testing import Bytes, bytes_of, make_inputs

LAYERS = 8
ALWAYS, NEVER = "1", "1000000"
"""Fewest operations that XLA turns into a command buffer."""


def q_absorb(**inputs: Any) -> tuple[jax.Array, jax.Array]:
    return jax_mla.q_absorb(**inputs, implementation="cuda")


def as_bytes(results: Sequence[jax.Array]) -> list[Bytes]:
    return [bytes_of(result) for result in results]


def assert_equal(actual: Sequence[Bytes], expected: Sequence[Bytes]) -> None:
    assert all(np.array_equal(a, e) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize(("heads", "batch"), [(6, 1), (12, 1), (16, 9), (12, 33), (96, 65)])
def test_twenty_calls_give_the_same_bits(heads: int, batch: int) -> None:
    inputs = make_inputs(batch, heads, pages=5, page_size=16)
    call = jax.jit(q_absorb)
    results = [call(**inputs) for _ in range(20)]
    for result in results[1:]:
        assert_equal(as_bytes(result), as_bytes(results[0]))


def layers(cache: jax.Array, calls: list[dict[str, jax.Array]]) -> list[jax.Array]:
    """The queries of several calls on one cache, then the cache."""
    queries = []
    for call in calls:
        q, cache = q_absorb(cache=cache, **call)
        queries.append(q)
    return [*queries, cache]


def layer_calls(heads: int, batch: int, seed: int) -> list[dict[str, jax.Array]]:
    calls = [make_inputs(batch, heads, pages=5, page_size=16, seed=seed + i) for i in range(LAYERS)]
    return [{name: x for name, x in call.items() if name != "cache"} for call in calls]


@pytest.mark.parametrize(("heads", "batch"), [(6, 1), (16, 8), (12, 40)])
def test_a_command_buffer_replays_what_eager_calls_do(heads: int, batch: int) -> None:
    """New inputs at new addresses too: a replay must not read what the capture saw."""
    cache = make_inputs(batch, heads, pages=5, page_size=16)["cache"]
    first, second = (layer_calls(heads, batch, seed) for seed in (0, 100))
    eager = {0: as_bytes(layers(cache, first)), 1: as_bytes(layers(cache, second))}
    lowered = jax.jit(layers).lower(cache, first)
    for fewest in (ALWAYS, NEVER):
        program = lowered.compile({"xla_gpu_graph_min_graph_size": fewest})
        for turn in (0, 0, 1, 1, 0):
            assert_equal(as_bytes(program(cache, second if turn else first)), eager[turn])


def test_two_jitted_functions_in_turns() -> None:
    """Both keep their kernel, launch shape and shared memory while the other runs between."""

    def jitted(scale: float) -> Callable[..., Any]:
        return jax.jit(lambda **inputs: q_absorb(q_scale=jax.numpy.float32(scale), **inputs))

    pairs = [
        (jitted(1.0), make_inputs(3, 6, pages=5, page_size=16)),
        (jitted(0.5), make_inputs(40, 12, pages=5, page_size=16)),
    ]
    alone = []
    for function, inputs in pairs:
        alone.append(as_bytes(function(**inputs)))
    in_turns = [function(**inputs) for _ in range(10) for function, inputs in pairs]
    for index, result in enumerate(in_turns):
        assert_equal(as_bytes(result), alone[index % 2])
