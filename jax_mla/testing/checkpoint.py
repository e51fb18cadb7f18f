"""A small checkpoint in Hugging Face's format."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jax_mla.errors import SetupError
from jax_mla.geometry import DEEPSEEK

BLOCK = 128
"""Rows and columns of an FP8 weight that share a scale."""

_VALUES = 128

_ROPE_SCALING = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def write_checkpoint(
    folder: str | Path, *, heads: int = 4, hidden: int = 512, seed: int = 0
) -> None:
    """Writes the attention of layer 0 of a model that is DeepSeek-V3 but for two sizes.

    config.json; random weights that keep unit variance, in FP8 with a scale for each block of
    128 x 128 as DeepSeek-V3's are, and norms in bf16; two files of tensors and their index. Needs
    the package safetensors (`pip install 'jax_mla[hf]'`).

    Args:
        folder: an existing one.
        heads: `num_attention_heads`, 128 in DeepSeek-V3.
        hidden: `hidden_size`, 7168 in DeepSeek-V3.
        seed: of the random numbers.

    Raises:
        jax_mla.SetupError: the package safetensors is not installed.
    """
    try:
        from safetensors.numpy import save_file
    except ImportError:
        raise SetupError(
            "Writing a checkpoint needs the package safetensors, which is not installed."
            " Run `pip install 'jax_mla[hf]'`."
        ) from None

    folder = Path(folder)
    tensors = _tensors(heads, hidden, np.random.default_rng(seed))
    files: dict[str, str] = {}
    for number in (1, 2):
        file = f"model-{number:05}-of-00002.safetensors"
        names = sorted(tensors)[number - 1 :: 2]
        named = {f"model.layers.0.self_attn.{name}": tensors[name] for name in names}
        save_file(named, folder / file)
        files |= dict.fromkeys(named, file)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(_config(heads, hidden), indent=2))


def _config(heads: int, hidden: int) -> dict[str, Any]:
    return {
        "model_type": "deepseek_v3",
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": DEEPSEEK.q_rank,
        "kv_lora_rank": DEEPSEEK.kv_rank,
        "qk_nope_head_dim": DEEPSEEK.nope,
        "qk_rope_head_dim": DEEPSEEK.rope,
        "v_head_dim": _VALUES,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 163840,
        "rope_theta": 10000,
        "rope_scaling": _ROPE_SCALING,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
    }


def _tensors(heads: int, hidden: int, rng: np.random.Generator) -> dict[str, npt.NDArray[Any]]:
    shapes = {
        "q_a_proj": (DEEPSEEK.q_rank, hidden),
        "q_b_proj": (heads * DEEPSEEK.head_rows, DEEPSEEK.q_rank),
        "kv_a_proj_with_mqa": (DEEPSEEK.row, hidden),
        "kv_b_proj": (heads * (DEEPSEEK.nope + _VALUES), DEEPSEEK.kv_rank),
        "o_proj": (hidden, heads * _VALUES),
    }
    tensors: dict[str, npt.NDArray[Any]] = {}
    for name, shape in shapes.items():
        weight = rng.standard_normal(shape, np.float32) * shape[1] ** -0.5
        padded = np.pad(np.abs(weight), [(0, -size % BLOCK) for size in shape])
        blocks = padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
        scales = blocks.max(axis=(1, 3)) / 448
        of_each = scales.repeat(BLOCK, axis=0).repeat(BLOCK, axis=1)[: shape[0], : shape[1]]
        tensors[f"{name}.weight"] = (weight / of_each).astype(jnp.float8_e4m3fn)
        tensors[f"{name}.weight_scale_inv"] = scales
    for name, columns in (("q_a_layernorm", DEEPSEEK.q_rank), ("kv_a_layernorm", DEEPSEEK.kv_rank)):
        norm = 1 + 0.1 * rng.standard_normal(columns, np.float32)
        tensors[f"{name}.weight"] = norm.astype(jnp.bfloat16)
    return tensors
