"""The choice of kernel: total, shipped, and the same for every rank."""

import itertools

from jax_mla.formats import CACHE_FORMATS, PLAIN, STYLES, Form
from jax_mla.rules import MAX_BATCH, MAX_HEADS
from jax_mla.variants import EXCHANGE, PLAIN_VARIANTS, SHIPPED, choose, variant_form

FORMS = [
    Form(cache=cache, q_dtype=q_dtype, style=style, q_latent=q_latent)
    for cache in CACHE_FORMATS
    for q_dtype in cache.q_dtypes
    for style in (None, *STYLES)
    for q_latent in (False, True)
]


def test_every_call_gets_a_shipped_variant() -> None:
    sizes = [*itertools.product(range(MAX_BATCH + 1), (1, 6, 7, 8, 128))]
    sizes += itertools.product((1, 2, 8, 9, 16, 17, 32, 33, 64, 65), range(1, MAX_HEADS + 1))
    of_each_form = {variant_form(form): form for form in FORMS}.values()
    chosen = {choose(batch, heads, form) for batch, heads in sizes for form in of_each_form}
    assert chosen == set(SHIPPED["sm_90a"]) - {EXCHANGE}, (
        "each shipped variant is chosen by some call, and no other"
    )


def test_a_variant_does_what_the_call_computes() -> None:
    for form in FORMS:
        variant = choose(9, 12, form)
        assert (variant.form == "plain") == (form == PLAIN)
        assert (variant.form == "bf16") == (form.q_dtype == "bfloat16")


def test_keys_name_one_variant_each() -> None:
    shipped = SHIPPED["sm_90a"]
    assert len({variant.key for variant in shipped}) == len(shipped)


def test_the_grid_stays_within_its_limits() -> None:
    # gridDim.z is at most 65535.
    assert all(MAX_BATCH / variant.tokens <= 65535 for variant in PLAIN_VARIANTS)
