"""Choose the kernel by hand, to measure and to test variants where they are not the choice."""

import contextlib
import dataclasses
from collections.abc import Iterator

from jax_mla import variants
from jax_mla.formats import PLAIN, Form


def variant_of(key: str) -> variants.Variant:
    """The plain variant of that key; KeyError names the keys there are."""
    by_key = {variant.key: variant for variant in variants.PLAIN_VARIANTS}
    if key not in by_key:
        raise KeyError(f"no variant {key!r}; there are {', '.join(by_key)}")
    return by_key[key]


@contextlib.contextmanager
def forced_variant(key: str) -> Iterator[None]:
    """Programs lowered inside take the plain variant `key`, or its like of the form that they need.

    Lower inside the block (`jax.jit(f).lower(...)`): a program that was lowered before keeps its
    variant, and so do the operations that JAX has already compiled for eager calls.
    """
    forced, usual = variant_of(key), variants.choose

    def choose(batch: int, heads: int, form: Form = PLAIN) -> variants.Variant:
        return dataclasses.replace(forced, form=variants.variant_form(form))

    variants.choose = choose
    try:
        yield
    finally:
        variants.choose = usual
