"""Chains of layers whose weights are cold in the L2 cache, as one jitted program.

A decode step meets every layer's weights once, long after the L2 has forgotten them. So a chain
rotates over layers that together exceed the L2 several times, and walks them for a few rounds so
that the dispatch of one program (hundreds of arguments) is spread thin. Layers run in sequence: a
barrier ties each layer's rows to the query before it, as the layers of a model are tied, and keeps
XLA from merging rounds that share weights.

Caches are donated. The queries of the last call are donated too, as memory for those of the next:
then no buffer ever moves, and XLA replays its command buffers without updating them.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from clock import Program

from jax_mla.rules import HEAD_ROWS, KV_RANK, NOPE, Q_RANK, QKV_COLUMNS, ROW, Problem

COLD_BYTES = 180e6  # three times the L2 of an H200
MAX_LAYERS = 42
CALLS = 128  # layers a program, about
PAGES, PAGE_SIZE = 72, 64
FLOOR_BYTES_PER_US = 4.44e6  # measured read bandwidth of an H200, 4.44 TB/s
FLOOR_FLOPS_PER_US = 790e6  # measured BF16 matrix rate of an H200, 790 TFLOP/s

Implementation = Callable[..., tuple[jax.Array, jax.Array]]


@dataclass(frozen=True)
class Workload:
    """A chain of layers with `heads` heads for `batch` tokens.

    `alone` returns the queries of the last round only, which halves what is dispatched. It is for
    q_absorb by itself: from other implementations XLA drops work whose results are not returned.
    """

    heads: int
    batch: int
    alone: bool = False

    @property
    def weight_bytes(self) -> int:
        """Bytes of the two matrices of one layer."""
        return self.heads * (HEAD_ROWS * Q_RANK + NOPE * KV_RANK) * 2

    @property
    def layers(self) -> int:
        return max(2, min(MAX_LAYERS, round(COLD_BYTES / self.weight_bytes)))

    @property
    def rounds(self) -> int:
        return -(-CALLS // self.layers)

    @property
    def floor_us(self) -> float:
        """Microseconds a layer below which no implementation can go on an H200."""
        problem = Problem(
            batch=self.batch,
            heads=self.heads,
            pages=PAGES,
            page_size=PAGE_SIZE,
            columns=QKV_COLUMNS,
        )
        return max(problem.bytes_moved / FLOOR_BYTES_PER_US, problem.flops / FLOOR_FLOPS_PER_US)

    def weights(self) -> list[tuple[jax.Array, ...]]:
        """Random q_norm, kv_norm, w_qb and w_uk of every layer."""
        return [self._layer(key) for key in jax.random.split(jax.random.key(0), self.layers)]

    def _layer(self, key: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, 4)
        return (
            1 + _normal(keys[0], (Q_RANK,), 0.1),
            1 + _normal(keys[1], (KV_RANK,), 0.1),
            _normal(keys[2], (self.heads * HEAD_ROWS, Q_RANK), Q_RANK**-0.5),
            _normal(keys[3], (self.heads, NOPE, KV_RANK), NOPE**-0.5),
        )

    def state(self) -> dict[str, Any]:
        """The remaining arguments of a chain."""
        row_key, slot_key = jax.random.split(jax.random.key(1))
        steps, fp8 = self.layers * self.rounds, jnp.float8_e4m3fn
        shape = (self.batch, QKV_COLUMNS)
        slots = jax.random.permutation(slot_key, PAGES * PAGE_SIZE)
        return {
            "rows": [_normal(key, shape, 1.0) for key in jax.random.split(row_key, steps)],
            "slots": slots[: self.batch].astype(jnp.int32),
            "scale": jnp.float32(0.05),
            "caches": [jnp.zeros((PAGES, PAGE_SIZE, ROW), fp8) for _ in range(self.layers)],
            "spent": [
                jnp.zeros((self.batch, self.heads, ROW), fp8)
                for _ in range(self.layers if self.alone else steps)
            ],
        }

    def lower(self, implementation: Implementation) -> jax.stages.Lowered:
        """The chain over `implementation`, ready to compile; allocates nothing."""
        weights, state = jax.eval_shape(self.weights), jax.eval_shape(self.state)
        lowered: jax.stages.Lowered = _jitted_chain(implementation).lower(weights=weights, **state)
        return lowered


@functools.partial(jax.jit, static_argnames="shape")
def _normal(key: jax.Array, shape: tuple[int, ...], deviation: float) -> jax.Array:
    """Normal bf16 values; one array a call, as XLA would generate a stack anew for each slice."""
    return (deviation * jax.random.normal(key, shape)).astype(jnp.bfloat16)


def _jitted_chain(implementation: Implementation) -> Any:
    def chain(
        *,
        rows: list[jax.Array],
        weights: list[tuple[jax.Array, ...]],
        slots: jax.Array,
        scale: jax.Array,
        caches: list[jax.Array],
        spent: list[jax.Array],
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        caches, queries, q = list(caches), [], None
        for index, row in enumerate(rows):
            layer = index % len(weights)
            row, q = jax.lax.optimization_barrier((row, q))
            q, caches[layer] = implementation(
                row, *weights[layer], caches[layer], slots, q_scale=scale, k_scale=scale
            )
            queries.append(q)
        return caches, queries[-len(spent) :]

    return jax.jit(chain, donate_argnames=("caches", "spent"), keep_unused=True)


class Chain:
    """A compiled chain with its arrays."""

    def __init__(
        self, compiled: jax.stages.Compiled, workload: Workload, weights: list[Any]
    ) -> None:
        self._compiled = compiled
        self._constant = {"weights": weights}
        state = workload.state()
        self._constant |= {name: state[name] for name in ("rows", "slots", "scale")}
        self._caches, self.queries = state["caches"], state["spent"]
        self._layers = workload.layers * workload.rounds

    def program(self) -> Program:
        return Program(call=self._call, wait=self._wait, layers=self._layers)

    def _call(self) -> None:
        self._caches, self.queries = self._compiled(
            **self._constant, caches=self._caches, spent=self.queries
        )

    def _wait(self) -> None:
        jax.block_until_ready((self._caches, self.queries))
