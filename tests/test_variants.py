"""The choice of kernel: total, shipped, and the same for every rank."""

from jax_mla.rules import MAX_BATCH, MAX_HEADS
from jax_mla.variants import SHIPPED, choose


def test_every_call_gets_a_shipped_variant() -> None:
    chosen = {choose(batch, heads) for batch in range(MAX_BATCH + 1) for heads in (1, 6, 7, 8, 128)}
    chosen |= {
        choose(batch, heads)
        for batch in (1, 2, 8, 9, 16, 17, 32, 33, 64, 65)
        for heads in range(1, MAX_HEADS + 1)
    }
    assert chosen == set(SHIPPED), "each shipped variant is chosen by some call, and no other"


def test_keys_name_one_variant_each() -> None:
    assert len({variant.key for variant in SHIPPED}) == len(SHIPPED)


def test_the_grid_stays_within_its_limits() -> None:
    # gridDim.z is at most 65535.
    assert all(MAX_BATCH / variant.tokens <= 65535 for variant in SHIPPED)
