"""Turns one layer of a Hugging Face checkpoint into the arguments of `jax_mla.q_absorb`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mla import hf_config, scalars
from jax_mla.errors import UnsupportedError
from jax_mla.hf_files import read_layer
from jax_mla.hf_tensors import LayerTensors
from jax_mla.rope import yarn_mscale

__all__ = ["Layer", "from_hf", "read_layer"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """The attention weights of one layer, rows as in the checkpoint; every array is bf16.

    A pytree whose two numbers are static. Sizes in brackets are DeepSeek's; H is the heads held.

    Attributes:
        w_a: [2112, hidden], the rows of `q_a_proj`, then `kv_a_proj_with_mqa`: the qkv that
            `q_absorb` takes is `hidden @ w_a.T`.
        q_norm, kv_norm: [1536], [512], `q_a_layernorm` and `kv_a_layernorm`, times LongCat's
            factors.
        w_qb: [H * 192, 1536], `q_b_proj`.
        w_uk: [H, 128, 512], the key rows of `kv_b_proj`, which `q_absorb` absorbs.
        w_uv: [H, V, 512], the value rows of `kv_b_proj`: a head's value is `w_uv[h] @ latent`.
        w_o: [hidden, H * V], `o_proj`'s columns of these heads; a layer split over ranks adds up
            what they give. None where there was none.
        eps: of both norms.
        softmax_scale: what attention multiplies scores by. Mistral-4's llama_4_scaling, a factor by
            position, is not in it.
    """

    w_a: jax.Array
    q_norm: jax.Array
    kv_norm: jax.Array
    w_qb: jax.Array
    w_uk: jax.Array
    w_uv: jax.Array
    w_o: jax.Array | None
    eps: float = field(metadata={"static": True})
    softmax_scale: float = field(metadata={"static": True})


# Programs with a Layer among their arguments can then be exported and saved.
jax.export.register_pytree_node_serialization(
    Layer,
    serialized_name="jax_mla.weights.Layer",
    serialize_auxdata=lambda static: json.dumps(static).encode(),
    deserialize_auxdata=lambda text: tuple(json.loads(text)),
)


def from_hf(
    layer_tensors: Mapping[str, Any],
    config: hf_config.Config,
    *,
    heads: range | slice | None = None,
    eps: float | None = None,
) -> Layer:
    """Returns a checkpoint layer's weights as `jax_mla.q_absorb` and attention take them.

    Weights in FP8 with a scale for each block of 128 x 128 (`weight_scale_inv`) are multiplied out
    in FP32 and rounded to bf16, as DeepSeek-V3's inference/fp8_cast_bf16.py does. LongCat's scaling
    of the normalised latents, sqrt(hidden / rank), is multiplied into the norms' weights, which
    are rounded to bf16 once more.

    Args:
        layer_tensors: NumPy or JAX arrays by name, such as `read_layer` returns: `q_a_proj.weight`,
            `q_a_layernorm.weight`, `q_b_proj.weight`, `kv_a_proj_with_mqa.weight`,
            `kv_a_layernorm.weight`, `kv_b_proj.weight` and, if wanted, `o_proj.weight`, with any
            prefix that ends in a dot. Other names are ignored.
        config: the parsed config.json, or an object with its fields as attributes.
        heads: those to hold, such as range(r * H // N, (r + 1) * H // N) for rank r of N; None for
            all.
        eps: of both norms; None for the configuration's `rms_norm_eps`, as vLLM and SGLang. The
            `transformers` package takes 1e-6 for these two norms whatever the configuration says:
            where that is not 1e-6 (LongCat, GLM), pass eps=1e-6 to agree with it.

    Returns:
        Arrays on JAX's default device.

    Raises:
        ValueError: a tensor, its scales or a field of the configuration are missing, a tensor has
            the wrong shape or occurs twice, or `heads` names none or others than there are.
        TypeError: a tensor is no array of BF16, FP16, FP32 or e4m3 numbers, or `heads` no range.
        jax_mla.UnsupportedError: the model's geometry is none that `q_absorb` serves, its
            projections have biases, or it has no query latent.

    Example:
        folder = pathlib.Path("DeepSeek-V3")
        config = json.loads((folder / "config.json").read_text())
        tensors = jax_mla.weights.read_layer(folder, 3)
        layer = jax_mla.weights.from_hf(tensors, config, heads=range(16))
    """
    config = hf_config.text_part(config)
    sizes = hf_config.geometry(config)
    if hf_config.optional(config, "attention_bias", False):
        raise UnsupportedError(
            "config's attention_bias must be false, got true. Projections with a bias are not"
            " supported."
        )
    remedy = "Pass the model's own config.json."
    hidden = hf_config.required(config, "hidden_size", remedy)
    head_count = hf_config.required(config, "num_attention_heads", remedy)
    values = hf_config.optional(config, "v_head_dim", hidden // head_count)  # MiniCPM3 has none
    if eps is None:
        eps = hf_config.required(config, "rms_norm_eps", "Pass eps=.")
    scalars.check_eps(eps)
    held = _held(heads, head_count)
    tensors = LayerTensors(layer_tensors, hf_config.fp8_block(config))
    q_factor, kv_factor = hf_config.latent_factors(config)

    w_qb = tensors.projection("q_b_proj", head_count * sizes.head_rows, sizes.q_rank)
    w_qb = w_qb.reshape(head_count, sizes.head_rows, sizes.q_rank)[held]
    w_kv_b = tensors.projection("kv_b_proj", head_count * (sizes.nope + values), sizes.kv_rank)
    w_kv_b = w_kv_b.reshape(head_count, sizes.nope + values, sizes.kv_rank)[held]
    w_q_a = tensors.projection("q_a_proj", sizes.q_rank, hidden)
    w_kv_a = tensors.projection("kv_a_proj_with_mqa", sizes.row, hidden)
    w_o = None
    if "o_proj.weight" in tensors:
        w_o = tensors.projection("o_proj", hidden, head_count * values)
        w_o = w_o.reshape(hidden, head_count, values)[:, held].reshape(hidden, -1)
    return Layer(
        w_a=jnp.asarray(np.concatenate([w_q_a, w_kv_a])),
        q_norm=jnp.asarray(tensors.norm("q_a_layernorm", sizes.q_rank, q_factor)),
        kv_norm=jnp.asarray(tensors.norm("kv_a_layernorm", sizes.kv_rank, kv_factor)),
        w_qb=jnp.asarray(w_qb.reshape(-1, sizes.q_rank)),
        w_uk=jnp.asarray(w_kv_b[:, : sizes.nope]),
        w_uv=jnp.asarray(w_kv_b[:, sizes.nope :]),
        w_o=None if w_o is None else jnp.asarray(w_o),
        eps=float(eps),
        softmax_scale=sizes.head_rows**-0.5 * _yarn_scale(config),
    )


def _held(heads: range | slice | None, count: int) -> slice:
    if heads is not None and not isinstance(heads, range | slice):
        raise TypeError(
            f"heads must be a range or a slice, got {type(heads).__name__}."
            " Pass range(first, last + 1)."
        )
    held = heads if isinstance(heads, range) else range(count)[heads or slice(None)]
    if not held or held.step < 1 or held[0] < 0 or held[-1] >= count:
        raise ValueError(
            f"heads must be some of 0 to {count - 1} in ascending order, got {heads}."
            f" Rank r of N holds range(r * {count} // N, (r + 1) * {count} // N)."
        )
    return slice(held.start, held.stop, held.step)


def _yarn_scale(config: hf_config.Config) -> float:
    """Returns what YaRN multiplies the softmax scale by, as in DeepSeek's modeling_deepseek.py."""
    given = hf_config.rope_parameters(config)
    weight = hf_config.optional(given, "mscale_all_dim", 0.0)
    scaled = given["rope_type"] != "default" and weight
    if not scaled or hf_config.optional(config, "mla_use_nope", False):
        return 1.0
    factor = hf_config.required(given, "factor", "YaRN needs it.")
    return yarn_mscale(factor, weight) ** 2
