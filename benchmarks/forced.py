"""Choose the kernel by hand, to measure and to test variants where they are not the choice."""

import contextlib
from collections.abc import Iterator

from jax_mla import variants


def variant_of(key: str) -> variants.Variant:
    """The shipped variant of that key; KeyError names the keys there are."""
    by_key = {variant.key: variant for variant in variants.SHIPPED}
    if key not in by_key:
        raise KeyError(f"no variant {key!r}; shipped: {', '.join(by_key)}")
    return by_key[key]


@contextlib.contextmanager
def forced_variant(key: str) -> Iterator[None]:
    """Programs lowered inside take the variant `key` whatever their shape.

    Lower inside the block (`jax.jit(f).lower(...)`): a program that was lowered before keeps its
    variant, and so do the operations that JAX has already compiled for eager calls.
    """
    forced, usual = variant_of(key), variants.choose
    variants.choose = lambda batch, heads: forced
    try:
        yield
    finally:
        variants.choose = usual
