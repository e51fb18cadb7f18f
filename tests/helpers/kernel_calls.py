"""Runs the kernel on memory that is poison before the call."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from forced import forced_variant

import jax_mla
from jax_mla.testing import Bytes, bytes_of

Inputs = Mapping[str, Any]
"""Arguments of q_absorb by name; all arrays."""

POISON = 0xFF
"""No kernel writes this byte (NaN is 0x7F): a query byte that still holds it was not written."""


def e4m3_array(values: Bytes) -> jax.Array:
    return jnp.asarray(values.view(ml_dtypes.float8_e4m3fn))


def take(inputs: Inputs, batch: int) -> dict[str, Any]:
    """The same call for the first `batch` tokens."""
    return {**inputs, "qkv": inputs["qkv"][:batch], "slots": inputs["slots"][:batch]}


def kernel_results(
    cases: Sequence[Inputs], variant: str | None = None, **options: Any
) -> list[tuple[jax.Array, jax.Array]]:
    """(q, cache) of each case from the kernel; the inputs stay as they are.

    Every q lies in memory that was full of POISON when the program started: its poison is donated,
    unused, and the results are checked to be at the same addresses.

    Args:
        cases: array arguments of q_absorb by name. All run in one program, to compile once.
        variant: key of the kernel to force; None leaves the choice to the package.
        **options: static arguments of q_absorb.
    """

    def program(
        poison: list[jax.Array], caches: list[jax.Array], cases: list[dict[str, Any]]
    ) -> list[tuple[jax.Array, jax.Array]]:
        del poison
        calls = zip(caches, cases, strict=True)
        return [
            jax_mla.q_absorb(cache=cache, **case, implementation="cuda", **options)
            for cache, case in calls
        ]

    shapes = [(len(case["slots"]), len(case["w_uk"]), case["cache"].shape[2]) for case in cases]
    poison = [e4m3_array(np.full(shape, POISON, np.uint8)) for shape in shapes]
    caches = [jnp.array(case["cache"], copy=True) for case in cases]
    others = [{k: v for k, v in case.items() if k != "cache"} for case in cases]
    jitted = jax.jit(program, donate_argnums=(0, 1), keep_unused=True)
    with forced_variant(variant) if variant else contextlib.nullcontext():
        compiled = jitted.lower(poison, caches, others).compile()
    addresses = [array.unsafe_buffer_pointer() for array in (*poison, *caches)]
    results = jax.block_until_ready(compiled(poison, caches, others))
    queries, new_caches = zip(*results, strict=True)
    found = [array.unsafe_buffer_pointer() for array in (*queries, *new_caches)]
    assert found == addresses, "results are not where the poison and the donated caches were"
    return list(results)


def kernel_bytes(
    cases: Sequence[Inputs], variant: str | None = None, **options: Any
) -> list[tuple[Bytes, Bytes]]:
    """kernel_results as bytes."""
    results = kernel_results(cases, variant, **options)
    return [(bytes_of(q), bytes_of(cache)) for q, cache in results]
