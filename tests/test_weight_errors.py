"""Tensors, configurations and heads that `from_hf` refuses, and what it says."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import DEEPSEEK_V3, HIDDEN, Tensors, random_tensors, shapes_of

import jax_mla
from jax_mla import weights


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    return random_tensors(DEEPSEEK_V3)


def without(tensors: Tensors, name: str) -> Tensors:
    return {key: tensor for key, tensor in tensors.items() if key != name}


@pytest.mark.parametrize("name", sorted(set(shapes_of(DEEPSEEK_V3)) - {"o_proj"}))
def test_a_missing_tensor_is_named(tensors: Tensors, name: str) -> None:
    with pytest.raises(ValueError, match=rf"must hold {name}\.weight, got .*read_layer"):
        weights.from_hf(without(tensors, f"{name}.weight"), DEEPSEEK_V3)


@pytest.mark.parametrize("name", sorted(shapes_of(DEEPSEEK_V3)))
def test_a_tensor_of_another_shape_is_named(tensors: Tensors, name: str) -> None:
    full_name = f"{name}.weight"
    wrong = tensors | {full_name: tensors[full_name][:-1]}
    shape = list(tensors[full_name].shape)
    with pytest.raises(ValueError, match=f"{full_name} must be") as caught:
        weights.from_hf(wrong, DEEPSEEK_V3)
    assert str(shape) in str(caught.value)
    assert str([shape[0] - 1, *shape[1:]]) in str(caught.value)


class TorchLike:
    """What PyTorch's arrays look like from outside."""

    dtype, shape = "torch.bfloat16", (1536,)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"q_b_proj.weight": np.zeros((768, 1536), np.int8)},
            TypeError,
            ["q_b_proj.weight", "float8_e4m3fn, bfloat16", "got int8"],
        ),
        ({"q_a_layernorm.weight": TorchLike()}, TypeError, ["q_a_layernorm", "torch.bfloat16"]),
        ({"q_a_layernorm.weight": [1.0]}, TypeError, ["q_a_layernorm", "got list"]),
        (
            {"q_a_layernorm.weight": np.zeros(1536, jnp.float8_e4m3fn)},
            TypeError,
            ["q_a_layernorm", "got float8_e4m3fn"],
        ),
        (
            {"o_proj.weight": np.zeros((HIDDEN, 512), jnp.float8_e4m3fn)},
            ValueError,
            ["o_proj.weight", "o_proj.weight_scale_inv", "float8_e4m3fn without it"],
        ),
        (
            {"o_proj.weight_scale_inv": np.zeros((2, 4), np.float32)},
            ValueError,
            ["o_proj.weight", "o_proj.weight_scale_inv", "bfloat16 with it"],
        ),
        (
            {
                "o_proj.weight": np.zeros((HIDDEN, 512), jnp.float8_e4m3fn),
                "o_proj.weight_scale_inv": np.zeros((1, 4), np.float32),
            },
            ValueError,
            ["o_proj.weight_scale_inv", "[2, 4]", "[1, 4]"],
        ),
        (
            {"layers.4.q_a_layernorm.weight": np.zeros(1536, np.float32)},
            ValueError,
            ["once", "q_a_layernorm.weight and layers.4.q_a_layernorm.weight"],
        ),
    ],
)
def test_a_wrong_tensor_is_refused_by_name(
    tensors: Tensors, changes: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        weights.from_hf(tensors | changes, DEEPSEEK_V3)
    assert all(word in str(caught.value) for word in words), caught.value


def test_no_tensors_at_all() -> None:
    with pytest.raises(ValueError, match=r"must hold q_b_proj\.weight, got nothing"):
        weights.from_hf({}, DEEPSEEK_V3)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"q_lora_rank": None}, jax_mla.UnsupportedError, ["q_lora_rank", "V2-Lite"]),
        (
            {"kv_lora_rank": 256},
            jax_mla.UnsupportedError,
            [
                "DeepSeek [1536, 512, 128, 64]",
                "MiniCPM3 [768, 256, 64, 32]",
                "[1536, 256, 128, 64]",
            ],
        ),
        ({"attention_bias": True}, jax_mla.UnsupportedError, ["attention_bias", "got true"]),
        ({"kv_lora_rank": None}, ValueError, ["kv_lora_rank", "got none", "MLA"]),
        ({"hidden_size": None}, ValueError, ["hidden_size", "got none"]),
        ({"num_attention_heads": None}, ValueError, ["num_attention_heads", "got none"]),
        ({"rms_norm_eps": None}, ValueError, ["rms_norm_eps", "Pass eps="]),
        (
            {"rope_scaling": {"type": "yarn", "mscale_all_dim": 1}},
            ValueError,
            ["factor", "YaRN"],
        ),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(
    tensors: Tensors, changes: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        weights.from_hf(tensors, DEEPSEEK_V3 | changes)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    "held", [range(3, 5), range(-1, 2), range(0), slice(4, 8), range(3, -1, -1)], ids=str
)
def test_heads_that_there_are_not_are_refused(tensors: Tensors, held: Any) -> None:
    with pytest.raises(ValueError, match="heads must be some of 0 to 3 in ascending order, got"):
        weights.from_hf(tensors, DEEPSEEK_V3, heads=held)


def test_heads_of_another_type_are_refused(tensors: Tensors) -> None:
    with pytest.raises(TypeError, match="heads must be a range or a slice, got list"):
        weights.from_hf(tensors, DEEPSEEK_V3, heads=[0, 1])  # type: ignore[arg-type]


@pytest.mark.parametrize("config", ["config.json", Path("config.json"), None])
def test_a_configuration_that_was_not_read_is_refused(tensors: Tensors, config: Any) -> None:
    with pytest.raises(
        TypeError, match=r"config must be the parsed config\.json, got .*json\.loads"
    ):
        weights.from_hf(tensors, config)


def test_an_epsilon_that_is_none_is_refused(tensors: Tensors) -> None:
    with pytest.raises(ValueError, match=r"eps must be finite and at least 0, got -1\.0"):
        weights.from_hf(tensors, DEEPSEEK_V3, eps=-1)
