"""Runs the kernel on memory that is poison before the call."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from forced import forced_variant

import jax_mla
from jax_mla.testing import Bytes, bytes_of

Inputs = Mapping[str, Any]
"""Arguments of q_absorb by name; arrays, and rope."""

POISON = 0xFF
"""No kernel writes this byte as e4m3, nor two of them as BF16 (NaN is 0x7F and 0x7FFF): what still
holds it was not written."""


def take(inputs: Inputs, batch: int) -> dict[str, Any]:
    """The same call for the first `batch` tokens."""
    taken = {**inputs, "qkv": inputs["qkv"][:batch], "slots": inputs["slots"][:batch]}
    if rope := inputs.get("rope"):
        taken["rope"] = rope.at(rope.positions[:batch])
    return taken


def kernel_results(
    cases: Sequence[Inputs], variant: str | None = None, **options: Any
) -> list[Any]:
    """The results of each case from the kernel; the inputs stay as they are.

    All of them but caches lie in memory that was full of POISON when the program started: its
    poison is donated, unused, and the results are checked to be at the same addresses.

    Args:
        cases: arguments of q_absorb by name. All run in one program, to compile once.
        variant: key of the kernel to force; None leaves the choice to the package.
        **options: static arguments of q_absorb.
    """

    def results_of(cache: jax.Array, case: Inputs) -> Any:
        return jax_mla.q_absorb(cache=cache, **case, implementation="cuda", **options)

    def program(
        poison: list[jax.Array], caches: list[jax.Array], cases: list[dict[str, Any]]
    ) -> list[Any]:
        del poison
        return [results_of(cache, case) for cache, case in zip(caches, cases, strict=True)]

    caches = [jnp.array(case["cache"], copy=True) for case in cases]
    others = [{k: v for k, v in case.items() if k != "cache"} for case in cases]
    types = jax.eval_shape(program, [], caches, others)
    poison = [poisoned(x) for q, _, *latent in types for x in (q, *latent)]
    jitted = jax.jit(program, donate_argnums=(0, 1), keep_unused=True)
    with forced_variant(variant) if variant else contextlib.nullcontext():
        compiled = jitted.lower(poison, caches, others).compile()
    addresses = [array.unsafe_buffer_pointer() for array in (*poison, *caches)]
    results = jax.block_until_ready(compiled(poison, caches, others))
    fresh = [x for q, _, *latent in results for x in (q, *latent)]
    found = [array.unsafe_buffer_pointer() for array in (*fresh, *(case[1] for case in results))]
    assert found == addresses, "results are not where the poison and the donated caches were"
    return list(results)


def poisoned(like: jax.ShapeDtypeStruct) -> jax.Array:
    """An array full of POISON."""
    poison = np.full((*like.shape, like.dtype.itemsize), POISON, np.uint8)
    return jnp.asarray(poison.view(like.dtype).reshape(like.shape))


def kernel_bytes(
    cases: Sequence[Inputs], variant: str | None = None, **options: Any
) -> list[tuple[Bytes, ...]]:
    """kernel_results as bytes."""
    results = kernel_results(cases, variant, **options)
    return [tuple(bytes_of(x) for x in case) for case in results]
