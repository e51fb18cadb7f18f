"""Tables, weights and an example against the models of the package transformers."""

import importlib
import importlib.util
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from absorbed import absorbed_attention

from jax_mla import Rope, weights

pytestmark = pytest.mark.transformers

HEADS, HIDDEN = 2, 96

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
KIMI_K2 = YARN | {"rope_theta": 50000.0, "factor": 32.0, "beta_fast": 1.0}
MSCALE_OF_V2 = {"mscale": 0.707, "mscale_all_dim": 0.707}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "DeepSeek-V2": ("deepseek_v2", "DeepseekV2", {"rope_parameters": YARN | MSCALE_OF_V2}),
    "DeepSeek-V3": ("deepseek_v3", "DeepseekV3", {"rope_parameters": YARN}),
    "DeepSeek-V3 halves": (
        "deepseek_v3",
        "DeepseekV3",
        {"rope_parameters": YARN, "rope_interleave": False},
    ),
    "Kimi-K2": ("deepseek_v3", "DeepseekV3", {"rope_parameters": KIMI_K2}),
    "LongCat": ("longcat_flash", "LongcatFlash", {"rms_norm_eps": 1e-5}),
    "GLM-4.7-Flash": ("glm4_moe_lite", "Glm4MoeLite", {"rms_norm_eps": 1e-5}),
    "MiniCPM3": ("minicpm3", "MiniCPM3", {"v_head_dim": 64, "rms_norm_eps": 1e-5}),
}
"""Module in transformers, prefix of its classes, and what the configuration changes."""


def model(name: str) -> tuple[Any, Any, str]:
    """(configuration, module of the model, prefix of its classes), one small layer."""
    folder, prefix, changes = MODELS[name]
    package = f"transformers.models.{folder}"
    configuration = importlib.import_module(f"{package}.configuration_{folder}")
    sizes = {
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": 163840,
    }
    config = getattr(configuration, f"{prefix}Config")(**sizes | changes)
    config._attn_implementation = "eager"
    return config, importlib.import_module(f"{package}.modeling_{folder}"), prefix


def attention_of(config: Any, module: Any, prefix: str) -> Any:
    """An attention layer with random weights, BF16 values as FP32."""
    import torch

    torch.manual_seed(0)
    kind = "MLA" if prefix == "LongcatFlash" else "Attention"
    attention = getattr(module, f"{prefix}{kind}")(config, layer_idx=0).eval()
    with torch.no_grad():
        for name, weight in attention.named_parameters():
            deviation, mean = (0.1, 1.0) if "layernorm" in name else (weight.shape[1] ** -0.5, 0.0)
            weight.normal_(mean, deviation)
            weight.copy_(weight.bfloat16())
    return attention


def their_output(
    attention: Any, embedding: Any, hidden: npt.NDArray[np.float32], positions: list[int]
) -> npt.NDArray[np.float64]:
    import torch

    tensor = torch.from_numpy(hidden)[None]
    future = torch.full((len(hidden), len(hidden)), -math.inf).triu(1)[None, None]
    with torch.no_grad():
        turns = embedding(tensor, torch.tensor(positions)[None])
        output, _ = attention(tensor, position_embeddings=turns, attention_mask=future)
    result: npt.NDArray[np.float64] = output[0].numpy().astype(np.float64)
    return result


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_computes_what_theirs_does(name: str) -> None:
    """With their eps: 1e-6 in the latents' norms whatever the configuration says."""
    config, module, prefix = model(name)
    attention = attention_of(config, module, prefix)
    tensors = {key: value.numpy() for key, value in attention.state_dict().items()}
    layer = weights.from_hf(tensors, config, eps=1e-6)
    assert layer.softmax_scale == pytest.approx(attention.scaling, rel=1e-12)

    positions = [0, 1, 2, 5, 40, 41, 300, 1999]
    rope = Rope.from_hf(config, max_positions=2000).at(jnp.array(positions, jnp.int32))
    hidden = np.random.default_rng(1).standard_normal((len(positions), HIDDEN), np.float32)
    embedding = getattr(module, f"{prefix}RotaryEmbedding")(config)
    theirs = their_output(attention, embedding, hidden, positions)
    ours = absorbed_attention(layer, hidden, rope)
    # Their angles are FP32, off by up to 1999 * 2**-24 each; LongCat's norms were rounded to BF16.
    bound = 2**-8 if name == "LongCat" else 1e-4
    assert np.linalg.norm(ours - theirs) < bound * np.linalg.norm(theirs)


def test_their_norms_take_another_eps_than_the_configuration() -> None:
    """What passing eps=1e-6 is for: LongCat's says 1e-5."""
    config, module, prefix = model("LongCat")
    attention = attention_of(config, module, prefix)
    tensors = {key: value.numpy() for key, value in attention.state_dict().items()}
    assert weights.from_hf(tensors, config).eps == 1e-5
    assert attention.q_a_layernorm.variance_epsilon == 1e-6


@pytest.mark.parametrize("name", ["DeepSeek-V3", "Kimi-K2", "LongCat", "MiniCPM3"])
def test_a_table_holds_their_cosines_and_sines(name: str) -> None:
    import torch

    config, module, prefix = model(name)
    embedding = getattr(module, f"{prefix}RotaryEmbedding")(config)
    table = np.asarray(Rope.from_hf(config).cos_sin)
    assert len(table) == 163840
    half = table.shape[1] // 2
    positions = np.array([0, 1, 7, 100, 4095, 20000, 163839])
    theirs = embedding(torch.zeros(1), torch.from_numpy(positions)[None])
    for actual, expected in zip((table[:, :half], table[:, half:]), theirs, strict=True):
        distance = np.abs(actual[positions] - expected[0, :, :half].numpy())
        # Their frequencies and angles are rounded to FP32: 2**-24 of the angle each, and 2**-23 for
        # the power and the division before.
        assert (distance.max(axis=1) <= positions * 2.0**-22 + 2.0**-23).all()


def test_a_table_has_their_frequencies() -> None:
    for name in ("DeepSeek-V3", "Kimi-K2", "LongCat", "MiniCPM3"):
        config, module, prefix = model(name)
        theirs = getattr(module, f"{prefix}RotaryEmbedding")(config).inv_freq.numpy()
        row = np.asarray(Rope.from_hf(config, max_positions=2).cos_sin)[1]
        angles = np.arctan2(row[len(theirs) :], row[: len(theirs)])
        assert np.allclose(angles, theirs, rtol=5e-7, atol=0), name


def test_files_that_torch_wrote_are_read_bit_by_bit(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    prefix = "model.layers.5.self_attn."
    wide = torch.randn(130, 7)
    stored = {
        "kv_a_proj_with_mqa.weight": wide.to(torch.float8_e4m3fn),
        "kv_a_proj_with_mqa.weight_scale_inv": torch.rand(2, 1),
        "kv_a_layernorm.weight": torch.randn(512).bfloat16(),
    }
    named = {prefix + name: value for name, value in stored.items()}
    save_file(named, tmp_path / "model.safetensors")
    read = weights.read_layer(tmp_path, 5)
    assert read.keys() == stored.keys()
    for name, value in stored.items():
        assert np.array_equal(read[name].astype(np.float32), value.float().numpy()), name
        assert read[name].dtype.name == str(value.dtype).removeprefix("torch.")


def test_the_example_agrees_with_their_attention(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[1] / "examples" / "deepseek_layer.py"
    spec = importlib.util.spec_from_file_location("deepseek_layer", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert example.main(["--against-transformers"]) == 0
    assert "FP32 output against transformers" in capsys.readouterr().out
