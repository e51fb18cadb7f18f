"""Configurations and random tensors of attention layers as checkpoints have them."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from jax_mla.geometry import Geometry

HIDDEN, HEADS = 160, 4  # hidden: not a multiple of a block of 128

Tensors = dict[str, npt.NDArray[Any]]

DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
LONGCAT = DEEPSEEK_V3 | {"model_type": "longcat_flash", "rope_scaling": None}


def config_of(geometry: Geometry, values: int) -> dict[str, Any]:
    return DEEPSEEK_V3 | {
        "q_lora_rank": geometry.q_rank,
        "kv_lora_rank": geometry.kv_rank,
        "qk_nope_head_dim": geometry.nope,
        "qk_rope_head_dim": geometry.rope,
        "v_head_dim": values,
    }


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, values = (
        config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    return {
        "q_a_proj": (q_rank, HIDDEN),
        "q_a_layernorm": (q_rank,),
        "q_b_proj": (HEADS * (nope + rope), q_rank),
        "kv_a_proj_with_mqa": (kv_rank + rope, HIDDEN),
        "kv_a_layernorm": (kv_rank,),
        "kv_b_proj": (HEADS * (nope + values), kv_rank),
        "o_proj": (HIDDEN, HEADS * values),
    }


def random_tensors(config: dict[str, Any], seed: int = 0) -> Tensors:
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes_of(config).items():
        scale, offset = (shape[-1] ** -0.5, 0.0) if len(shape) == 2 else (0.1, 1.0)
        values = offset + scale * rng.standard_normal(shape, np.float32)
        tensors[f"{name}.weight"] = values.astype(jnp.bfloat16)
    return tensors


def in_fp8(tensors: Tensors, seed: int = 1) -> Tensors:
    """The projections as random e4m3 values with a random scale for each block."""
    rng = np.random.default_rng(seed)
    quantized = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            blocks = tuple(-(-size // 128) for size in tensor.shape)
            values = 100 * rng.standard_normal(tensor.shape, np.float32)
            quantized[name] = np.clip(values, -448, 448).astype(jnp.float8_e4m3fn)
            scales = rng.uniform(1e-4, 2e-4, blocks).astype(np.float32)
            quantized[f"{name}_scale_inv"] = scales
    return quantized


def named(tensors: Tensors, prefix: str) -> Tensors:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def write_checkpoint(folder: Path, files: dict[str, Tensors]) -> None:
    for file, tensors in files.items():
        save_file(tensors, folder / file)
    index = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
