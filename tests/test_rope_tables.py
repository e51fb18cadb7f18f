"""Tables of cosines and sines against the formulas written out, a number at a time."""

import math
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_mla import Rope

DEEPSEEK_V3 = {
    "qk_rope_head_dim": 64,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
"""What DeepSeek-V3's config.json says about positions."""

YARN: dict[str, dict[str, Any]] = {
    "DeepSeek-V3": {"factor": 40, "original_max_positions": 4096},
    "DeepSeek-V2": {"factor": 40, "original_max_positions": 4096, "mscale": 0.707},
    "Kimi-K2": {
        "factor": 32,
        "original_max_positions": 4096,
        "theta": 50000.0,
        "beta_fast": 1,
    },
    "short": {"factor": 4, "original_max_positions": 4, "dim": 32},
    "not longer": {"factor": 1, "original_max_positions": 4096},
}


def turning(theta: float, dim: int, pair: int) -> float:
    return math.pow(theta, -2 * pair / dim)


def yarn_turning(
    pair: int,
    *,
    factor: float,
    original_max_positions: int,
    theta: float = 10000.0,
    beta_fast: float = 32,
    beta_slow: float = 1,
    dim: int = 64,
    **_: float,
) -> float:
    """What a pair turns in a position: YaRN's mixture, for one pair."""
    bounds = []
    for turns in (beta_fast, beta_slow):
        # The pair whose wavelength fits `turns` times into the original context.
        wavelength = original_max_positions / turns
        bounds.append(dim / 2 * math.log(wavelength / (2 * math.pi), theta))
    low, high = max(math.floor(bounds[0]), 0), min(math.ceil(bounds[1]), dim - 1)
    share = min(max((pair - low) / ((high - low) or 0.001), 0), 1)
    plain = turning(theta, dim, pair)
    return plain * (1 - share) + plain / factor * share


@pytest.mark.parametrize(("theta", "dim"), [(10000.0, 64), (1e7, 64), (10000.0, 32)])
def test_an_unscaled_table_holds_cosines_then_sines(theta: float, dim: int) -> None:
    rope = Rope.default(max_positions=5000, theta=theta, dim=dim)
    assert rope.cos_sin.dtype == jnp.float32
    assert rope.cos_sin.shape == (5000, dim)
    table = np.asarray(rope.cos_sin)
    for position in (0, 1, 4999):
        for pair in range(dim // 2):
            angle = position * turning(theta, dim, pair)
            assert table[position, pair] == pytest.approx(math.cos(angle), abs=6e-8)
            assert table[position, dim // 2 + pair] == pytest.approx(math.sin(angle), abs=6e-8)


@pytest.mark.parametrize("name", YARN)
def test_a_yarn_table_follows_the_formula(name: str) -> None:
    options = YARN[name]
    table = np.asarray(Rope.yarn(max_positions=3000, **options).cos_sin)
    half = options.get("dim", 64) // 2
    logarithm = 0.1 * math.log(options["factor"])
    ratio = (1 + options.get("mscale", 1) * logarithm) / (1 + logarithm)
    for position in (0, 1, 2999):
        for pair in range(half):
            angle = position * yarn_turning(pair, **options)
            expected = ratio * math.cos(angle), ratio * math.sin(angle)
            assert table[position, pair] == pytest.approx(expected[0], abs=1e-7)
            assert table[position, half + pair] == pytest.approx(expected[1], abs=1e-7)


@pytest.mark.parametrize(
    ("name", "last_kept", "first_divided"),
    # Worked out by hand: 32 ln(4096 / (2 pi 32)) / ln 10000 = 10.47 and, with 1 for 32, 22.51;
    # 32 ln(4096 / 2 pi) / ln 50000 = 19.16.
    [("DeepSeek-V3", 10, 23), ("Kimi-K2", 19, 20)],
)
def test_fast_pairs_stay_and_slow_pairs_are_stretched(
    name: str, last_kept: int, first_divided: int
) -> None:
    options = YARN[name]
    theta = options.get("theta", 10000.0)
    sines = np.asarray(Rope.yarn(max_positions=2, **options).cos_sin)[1, 32:]
    plain = np.sin([turning(theta, 64, pair) for pair in range(32)])
    stretched = np.sin([turning(theta, 64, pair) / options["factor"] for pair in range(32)])
    assert np.flatnonzero(np.isclose(sines, plain, rtol=1e-6, atol=0))[-1] == last_kept
    assert np.flatnonzero(np.isclose(sines, stretched, rtol=1e-6, atol=0))[0] == first_divided


def test_far_positions_are_exact_to_float32() -> None:
    """A float32 angle of pair 1 has steps of 2**-7 there."""
    table = np.asarray(Rope.default(max_positions=163840).cos_sin)
    for pair in (0, 1, 31):
        angle = 163839 * turning(10000.0, 64, pair)
        assert table[-1, pair] == pytest.approx(math.cos(angle), abs=6e-8)


def test_a_step_shares_the_table() -> None:
    rope = Rope.default(max_positions=8, style="half")
    step = rope.at(jnp.array([3, 5], jnp.int32))
    assert rope.positions is None
    assert step.cos_sin is rope.cos_sin
    assert step.style == "half"
    assert np.asarray(step.positions).tolist() == [3, 5]


def test_it_is_a_pytree_with_a_static_style() -> None:
    rope = Rope.default(max_positions=8, style="half").at(jnp.array([3], jnp.int32))
    leaves, structure = jax.tree.flatten(rope)
    assert [id(leaf) for leaf in leaves] == [id(rope.cos_sin), id(rope.positions)]
    assert jax.tree.map(lambda _: object(), rope).style == "half"
    other_style = jax.tree.structure(Rope(rope.cos_sin, rope.positions))
    assert structure not in [other_style]
    looked_up = jax.jit(lambda rope: rope.cos_sin[rope.positions])(rope)
    assert np.array_equal(looked_up[0], rope.cos_sin[3])
    table = jax.jit(lambda rope: rope)(Rope(rope.cos_sin))
    assert table.positions is None


@pytest.mark.parametrize("wrap", [dict, lambda x: types.SimpleNamespace(**x)])
def test_a_configuration_gives_its_yarn_table(wrap: Any) -> None:
    rope = Rope.from_hf(wrap(DEEPSEEK_V3), max_positions=100)
    expected = Rope.yarn(max_positions=100, factor=40, original_max_positions=4096)
    assert np.array_equal(rope.cos_sin, expected.cos_sin)
    assert rope.style == "interleaved"


def test_the_table_is_as_long_as_the_model_allows() -> None:
    config = DEEPSEEK_V3 | {"max_position_embeddings": 77, "rope_scaling": None}
    rope = Rope.from_hf(config)
    assert np.array_equal(rope.cos_sin, Rope.default(max_positions=77).cos_sin)


def test_every_field_of_a_yarn_configuration_counts() -> None:
    scaling = {
        "rope_type": "deepseek_yarn",
        "factor": 120,
        "original_max_position_embeddings": 8192,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 0.5,
        "mscale_all_dim": 0.25,
        "rope_theta": 1e6,
    }
    config = {"qk_rope_head_dim": 32, "rope_parameters": scaling}
    expected = Rope.yarn(
        max_positions=50,
        factor=120,
        original_max_positions=8192,
        beta_fast=16,
        beta_slow=2,
        mscale=0.5,
        mscale_all_dim=0.25,
        theta=1e6,
        dim=32,
    )
    assert np.array_equal(Rope.from_hf(config, max_positions=50).cos_sin, expected.cos_sin)


def test_a_configuration_without_mscale_means_the_papers_factor() -> None:
    """DeepSeek's code then divides by 1, as the paper does: 0.1 ln(40) + 1."""
    scaling = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    table = Rope.from_hf(DEEPSEEK_V3 | {"rope_scaling": scaling}, max_positions=1).cos_sin
    assert np.asarray(table)[0, 0] == pytest.approx(0.1 * math.log(40) + 1, rel=1e-7)


@pytest.mark.parametrize(
    ("changes", "style"),
    [
        ({"rope_interleave": True}, "interleaved"),
        ({"rope_interleave": False}, "half"),
        ({"model_type": "minicpm3"}, "half"),
        ({"model_type": "kimi_k2"}, "interleaved"),
    ],
    ids=lambda value: str(value),
)
def test_a_configuration_gives_the_style(changes: dict[str, Any], style: str) -> None:
    assert Rope.from_hf(DEEPSEEK_V3 | changes, max_positions=2).style == style


def test_a_style_may_be_given() -> None:
    assert Rope.from_hf(DEEPSEEK_V3, max_positions=2, style="half").style == "half"


def test_a_multimodal_model_nests_its_configuration() -> None:
    nested = {"model_type": "kimi_k25", "text_config": DEEPSEEK_V3}
    rope = Rope.from_hf(nested, max_positions=9)
    assert np.array_equal(rope.cos_sin, Rope.from_hf(DEEPSEEK_V3, max_positions=9).cos_sin)


def yarn(**changes: Any) -> Rope:
    options = {"max_positions": 8, "factor": 40, "original_max_positions": 4096}
    return Rope.yarn(**options | changes)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Rope.default(max_positions=0), ["max_positions", "at least 1", "got 0"]),
        (lambda: Rope.default(max_positions=8, theta=1), ["theta", "above 1", "got 1"]),
        (lambda: Rope.default(max_positions=8, theta=math.nan), ["theta", "above 1", "nan"]),
        (lambda: Rope.default(max_positions=8, dim=0), ["dim", "at least 1", "got 0"]),
        (lambda: Rope.default(max_positions=8, dim=63), ["dim", "even", "got 63"]),
        (lambda: Rope.default(max_positions=8, style="neox"), ["style", "half", "'neox'"]),
        (lambda: yarn(max_positions="8"), ["max_positions", "an integer", "'8'"]),
        (lambda: yarn(factor=math.inf), ["factor", "finite", "got inf"]),
        (lambda: yarn(mscale_all_dim=math.nan), ["mscale_all_dim", "finite", "got nan"]),
        (lambda: yarn(factor=0.5), ["factor", "at least 1", "got 0.5"]),
        (lambda: yarn(original_max_positions=0), ["original_max_positions", "at least 1"]),
        (lambda: yarn(beta_slow=0), ["beta_slow", "above 0", "got 0"]),
        (lambda: yarn(beta_fast=0.5), ["beta_fast", "at least 1", "got 0.5"]),
        (lambda: Rope(jnp.zeros((1, 64)), style="interleave"), ["interleaved", "'interleave'"]),
    ],
)
def test_a_wrong_number_is_refused_by_name(make: Any, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"\. ") as caught:
        make()
    assert all(word in str(caught.value) for word in words), caught.value


def scaled(**changes: Any) -> dict[str, Any]:
    return DEEPSEEK_V3 | {"rope_scaling": DEEPSEEK_V3["rope_scaling"] | changes}  # type: ignore[operator]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (DEEPSEEK_V3 | {"mla_use_nope": True}, ["mla_use_nope", "Leave rope out"]),
        (DEEPSEEK_V3 | {"rope_theta": None}, ["rope_theta", "got none"]),
        (DEEPSEEK_V3 | {"qk_rope_head_dim": None}, ["qk_rope_head_dim", "MLA"]),
        (DEEPSEEK_V3 | {"max_position_embeddings": None}, ["max_position_embeddings", "Pass"]),
        (scaled(type="longrope"), ["rope_type", "'longrope'", "default or yarn"]),
        (scaled(attention_factor=1.5), ["attention_factor", "1.5", "left out"]),
        (scaled(truncate=False), ["truncate", "False", "left out"]),
        (scaled(factor=None), ["factor", "got none"]),
        (scaled(original_max_position_embeddings=None), ["original_max_position_embeddings"]),
    ],
)
def test_a_configuration_that_has_no_such_table_is_refused(
    config: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ValueError, match="config") as caught:
        Rope.from_hf(config)
    assert all(word in str(caught.value) for word in words), caught.value
