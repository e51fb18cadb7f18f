"""Checkpoint layers as arguments, against the checkpoint's own tensors."""

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from absorbed import absorbed_attention, rms_norm, softmax
from checkpoints import (
    DEEPSEEK_V3,
    HEADS,
    HIDDEN,
    LONGCAT,
    Tensors,
    config_of,
    in_fp8,
    random_tensors,
)

from jax_mla import weights
from jax_mla.geometry import GEOMETRIES, Geometry


def multiplied_out(weight: npt.NDArray[Any], scales: npt.NDArray[Any]) -> npt.NDArray[Any]:
    rows, columns = np.indices(weight.shape)
    exact = weight.astype(np.float64) * scales[rows // 128, columns // 128]
    rounded: npt.NDArray[Any] = exact.astype(np.float32).astype(jnp.bfloat16)
    return rounded


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    return random_tensors(DEEPSEEK_V3)


def same(actual: jax.Array | None, expected: npt.NDArray[Any]) -> bool:
    """Whether two bf16 arrays have the same bits."""
    assert actual is not None
    assert actual.dtype == jnp.bfloat16
    assert actual.shape == expected.shape
    return bool((np.asarray(actual).view(np.uint16) == expected.view(np.uint16)).all())


@pytest.mark.parametrize("values", [128, 256], ids=lambda value: f"v{value}")
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: geometry.name)
def test_every_row_is_where_the_checkpoint_has_it(geometry: Geometry, values: int) -> None:
    config = config_of(geometry, values)
    tensors = random_tensors(config)
    layer = weights.from_hf(tensors, config)
    q_a, kv_a = tensors["q_a_proj.weight"], tensors["kv_a_proj_with_mqa.weight"]
    assert same(layer.w_a, np.concatenate([q_a, kv_a]))
    assert same(layer.q_norm, tensors["q_a_layernorm.weight"])
    assert same(layer.kv_norm, tensors["kv_a_layernorm.weight"])
    assert same(layer.w_qb, tensors["q_b_proj.weight"])
    assert same(layer.w_o, tensors["o_proj.weight"])
    kv_b, rows = tensors["kv_b_proj.weight"], geometry.nope + values
    for head in range(HEADS):
        first = head * rows
        assert same(layer.w_uk[head], kv_b[first : first + geometry.nope])
        assert same(layer.w_uv[head], kv_b[first + geometry.nope : first + rows])


def textbook(
    tensors: Tensors, config: dict[str, Any], hidden: npt.NDArray[Any], factors: tuple[float, float]
) -> npt.NDArray[np.float64]:
    """The last token's output from the checkpoint's tensors: keys and values of each head."""
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    nope, values, kv_rank = (
        config[name] for name in ("qk_nope_head_dim", "v_head_dim", "kv_lora_rank")
    )
    eps = config["rms_norm_eps"]
    q_latent = rms_norm(hidden[-1:] @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"], eps)
    q = (factors[0] * q_latent @ w["q_b_proj.weight"].T).reshape(HEADS, -1)
    kv_a = hidden @ w["kv_a_proj_with_mqa.weight"].T
    latents = factors[1] * rms_norm(kv_a[:, :kv_rank], w["kv_a_layernorm.weight"], eps)
    kv = (latents @ w["kv_b_proj.weight"].T).reshape(len(hidden), HEADS, nope + values)
    scale = (nope + config["qk_rope_head_dim"]) ** -0.5
    heads = []
    for head in range(HEADS):
        keys = np.concatenate([kv[:, head, :nope], kv_a[:, kv_rank:]], axis=1)
        heads.append(softmax(keys @ q[head] * scale) @ kv[:, head, nope:])
    result: npt.NDArray[np.float64] = w["o_proj.weight"] @ np.concatenate(heads)
    return result


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_attention_of_all_ranks_adds_up_to_the_textbook_form(tensors: Tensors, ranks: int) -> None:
    config = DEEPSEEK_V3 | {"rope_scaling": None}
    hidden = np.random.default_rng(3).standard_normal((5, HIDDEN))
    each = HEADS // ranks
    parts = [
        weights.from_hf(tensors, config, heads=range(rank * each, (rank + 1) * each))
        for rank in range(ranks)
    ]
    actual = sum(absorbed_attention(part, hidden)[-1] for part in parts)
    expected = textbook(tensors, config, hidden, (1.0, 1.0))
    assert np.allclose(actual, expected, rtol=1e-9, atol=1e-12)


def test_longcats_scaling_is_in_the_norms(tensors: Tensors) -> None:
    layer = weights.from_hf(tensors, LONGCAT)
    factors = (HIDDEN / 1536) ** 0.5, (HIDDEN / 512) ** 0.5
    hidden = np.random.default_rng(4).standard_normal((5, HIDDEN))
    expected = textbook(tensors, LONGCAT, hidden, factors)
    # The product is rounded to bf16 once more, by up to 2**-9 of each weight.
    error = np.linalg.norm(absorbed_attention(layer, hidden)[-1] - expected) / np.linalg.norm(
        expected
    )
    assert error < 2**-9
    scaled = tensors["kv_a_layernorm.weight"].astype(np.float32) * np.float32(factors[1])
    assert same(layer.kv_norm, scaled.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("changes", "q_scaled", "kv_scaled"),
    [
        ({}, True, True),
        ({"mla_scale_q_lora": False}, False, True),
        ({"mla_scale_kv_lora": False}, True, False),
        ({"model_type": "other", "mla_scale_q_lora": True}, True, False),
        ({"model_type": "deepseek_v3"}, False, False),
    ],
)
def test_only_longcats_latents_are_scaled(
    tensors: Tensors, changes: dict[str, Any], q_scaled: bool, kv_scaled: bool
) -> None:
    layer = weights.from_hf(tensors, LONGCAT | changes)
    assert same(layer.q_norm, tensors["q_a_layernorm.weight"]) != q_scaled
    assert same(layer.kv_norm, tensors["kv_a_layernorm.weight"]) != kv_scaled


def test_fp8_blocks_are_multiplied_out(tensors: Tensors) -> None:
    """Their last rows and columns fill no block: 576 rows of kv_a_proj, 160 columns."""
    stored = in_fp8(tensors)
    layer = weights.from_hf(stored, DEEPSEEK_V3)
    expected = {
        name: multiplied_out(tensor, stored[f"{name}_scale_inv"])
        for name, tensor in stored.items()
        if tensor.dtype == jnp.float8_e4m3fn
    }
    q_a, kv_a = expected["q_a_proj.weight"], expected["kv_a_proj_with_mqa.weight"]
    assert same(layer.w_a, np.concatenate([q_a, kv_a]))
    assert same(layer.w_qb, expected["q_b_proj.weight"])
    assert same(layer.w_o, expected["o_proj.weight"])
    kv_b = expected["kv_b_proj.weight"].reshape(HEADS, 256, 512)
    assert same(layer.w_uk, kv_b[:, :128])
    assert same(layer.w_uv, kv_b[:, 128:])


def test_blocks_of_another_size_and_scales_of_another_dtype(tensors: Tensors) -> None:
    stored = dict(tensors)
    stored["o_proj.weight"] = np.ones((HIDDEN, HEADS * 128), jnp.float8_e4m3fn)
    scales = np.ones((HIDDEN // 32, HEADS), np.float32)
    scales[1, 2] = 4
    stored["o_proj.weight_scale_inv"] = scales.astype(jnp.float8_e8m0fnu)
    config = DEEPSEEK_V3 | {"quantization_config": {"weight_block_size": [32, 128]}}
    w_o = np.asarray(weights.from_hf(stored, config).w_o).astype(np.float32)
    expected = np.ones_like(w_o)
    expected[32:64, 256:384] = 4
    assert np.array_equal(w_o, expected)


def test_weights_of_wider_types_are_rounded(tensors: Tensors) -> None:
    slightly = np.float32(1 + 2**-10)  # a quarter of a step of bf16, or less
    wide = {name: tensor.astype(np.float32) * slightly for name, tensor in tensors.items()}
    layer = weights.from_hf(wide, DEEPSEEK_V3)
    assert same(layer.w_qb, tensors["q_b_proj.weight"])
    assert same(layer.q_norm, tensors["q_a_layernorm.weight"])


def test_names_may_have_a_prefix_and_others_are_ignored(tensors: Tensors) -> None:
    prefix = "model.layers.3.self_attn."
    named = {prefix + name: jnp.asarray(tensor) for name, tensor in tensors.items()}
    named["model.layers.3.self_attn.indexer.wk.weight"] = jnp.zeros(3)
    named["model.layers.3.mlp.gate_proj.weight"] = jnp.zeros(3)
    assert same(weights.from_hf(named, DEEPSEEK_V3).w_qb, tensors["q_b_proj.weight"])


def test_o_proj_may_be_left_out(tensors: Tensors) -> None:
    some = {name: tensor for name, tensor in tensors.items() if name != "o_proj.weight"}
    assert weights.from_hf(some, DEEPSEEK_V3).w_o is None


@pytest.mark.parametrize("held", [slice(1, 3), range(1, 3)])
def test_heads_may_be_a_slice_or_a_range(tensors: Tensors, held: Any) -> None:
    layer = weights.from_hf(tensors, DEEPSEEK_V3, heads=held)
    whole = weights.from_hf(tensors, DEEPSEEK_V3)
    assert same(layer.w_qb, np.asarray(whole.w_qb)[192 : 3 * 192])
    assert same(layer.w_uk, np.asarray(whole.w_uk)[1:3])
    assert same(layer.w_uv, np.asarray(whole.w_uv)[1:3])
    assert same(layer.w_o, np.asarray(whole.w_o)[:, 128 : 3 * 128])
    assert same(layer.w_a, np.asarray(whole.w_a))


def test_numbers_come_from_the_configuration(tensors: Tensors) -> None:
    layer = weights.from_hf(tensors, DEEPSEEK_V3 | {"rms_norm_eps": 1e-5})
    assert layer.eps == 1e-5
    # DeepSeek-V3: (0.1 ln 40 + 1) squared is 1.8739, 192 the columns of a key.
    assert layer.softmax_scale == pytest.approx(1.87385 / 192**0.5, rel=1e-5)
    assert weights.from_hf(tensors, DEEPSEEK_V3, eps=3e-6).eps == 3e-6


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({"rope_scaling": None}, 1.0),
        ({"rope_scaling": {"type": "yarn", "factor": 40}}, 1.0),
        ({"rope_scaling": {"type": "yarn", "factor": 40, "mscale_all_dim": 0.707}}, 1.58963),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 32}}, 1.81326),
        ({"mla_use_nope": True}, 1.0),
    ],
    ids=["no scaling", "no mscale", "DeepSeek-V2", "Kimi-K2", "NoPE"],
)
def test_the_softmax_scale_carries_yarns_factor(
    tensors: Tensors, changes: dict[str, Any], factor: float
) -> None:
    layer = weights.from_hf(tensors, DEEPSEEK_V3 | changes)
    assert layer.softmax_scale == pytest.approx(factor / 192**0.5, rel=1e-5)


def test_a_configuration_may_be_an_object_or_nested(tensors: Tensors) -> None:
    layer = weights.from_hf(tensors, DEEPSEEK_V3)
    for config in (types.SimpleNamespace(**DEEPSEEK_V3), {"text_config": DEEPSEEK_V3}):
        other = weights.from_hf(tensors, config)
        assert same(other.w_qb, np.asarray(layer.w_qb))
        assert (other.eps, other.softmax_scale) == (layer.eps, layer.softmax_scale)


def test_a_head_width_that_the_configuration_leaves_out_is_an_even_share() -> None:
    """MiniCPM3: hidden over heads, 40 here."""
    config = DEEPSEEK_V3 | {"v_head_dim": 40}
    tensors = random_tensors(config)
    layer = weights.from_hf(tensors, config | {"v_head_dim": None})
    assert layer.w_uv.shape == (HEADS, 40, 512)


def test_a_program_with_a_layer_among_its_arguments_is_saved(tensors: Tensors) -> None:
    layer = weights.from_hf(tensors, DEEPSEEK_V3)
    step = jax.jit(lambda layer: layer.kv_norm * layer.softmax_scale)
    again = jax.export.deserialize(jax.export.export(step)(layer).serialize())
    np.testing.assert_array_equal(again.call(layer), step(layer))


def test_a_layer_is_a_pytree_with_static_numbers(tensors: Tensors) -> None:
    layer = weights.from_hf(tensors, DEEPSEEK_V3)
    assert len(jax.tree.leaves(layer)) == 7
    jitted = jax.jit(lambda layer: layer.w_qb[0, 0] * layer.eps)(layer)
    expected = tensors["q_b_proj.weight"][0, 0].astype(np.float32) * 1e-6
    assert float(jitted) == pytest.approx(float(expected), rel=2**-7)
