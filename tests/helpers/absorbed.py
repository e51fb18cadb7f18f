"""Absorbed attention in float64, on the weights as `from_hf` returns them."""

from typing import Any

import numpy as np
import numpy.typing as npt

from jax_mla import Rope
from jax_mla.weights import Layer

Doubles = npt.NDArray[np.float64]


def absorbed_attention(layer: Layer, hidden: npt.NDArray[Any], rope: Rope | None = None) -> Doubles:
    """The output [T, hidden] for the tokens of one sequence, each attending to those before.

    Args:
        layer: weights of some heads; the output is their share of the sum.
        hidden: [T, hidden].
        rope: a table with the positions of the tokens; None for no rotation.
    """
    assert layer.w_o is not None
    w_a, q_norm, kv_norm, w_qb, w_uk, w_uv, w_o = (
        np.asarray(getattr(layer, name)).astype(np.float64)
        for name in ("w_a", "q_norm", "kv_norm", "w_qb", "w_uk", "w_uv", "w_o")
    )
    heads, nope, _ = w_uk.shape
    qkv = hidden @ w_a.T
    q_latent, kv_latent, k_pe = np.split(qkv, np.cumsum([len(q_norm), len(kv_norm)]), axis=1)
    q = (rms_norm(q_latent, q_norm, layer.eps) @ w_qb.T).reshape(len(hidden), heads, -1)
    q_pe = q[..., nope:]
    if rope is not None:
        q_pe, k_pe = rotate(q_pe, rope), rotate(k_pe[:, None], rope)[:, 0]
    queries = np.concatenate([np.einsum("thp,hpl->thl", q[..., :nope], w_uk), q_pe], axis=2)
    latents = rms_norm(kv_latent, kv_norm, layer.eps)
    scores = np.einsum("ihd,jd->hij", queries, np.concatenate([latents, k_pe], axis=1))
    scores = np.where(np.tri(len(hidden), dtype=bool), scores * layer.softmax_scale, -np.inf)
    attended = np.einsum("hij,jl->ihl", softmax(scores), latents)
    values = np.einsum("ihl,hvl->ihv", attended, w_uv)
    result: Doubles = values.reshape(len(hidden), -1) @ w_o.T
    return result


def rotate(x: Doubles, rope: Rope) -> Doubles:
    """x [T, N, R] with each pair of columns turned."""
    cos, sin = np.split(np.asarray(rope.cos_sin).astype(np.float64), 2, axis=1)
    at = np.asarray(rope.positions)
    cos, sin = cos[at][:, None], sin[at][:, None]
    half = x.shape[2] // 2
    first, second = np.arange(half), np.arange(half) + half
    if rope.style == "interleaved":
        first, second = 2 * np.arange(half), 2 * np.arange(half) + 1
    turned = np.empty_like(x)
    turned[..., first] = x[..., first] * cos - x[..., second] * sin
    turned[..., second] = x[..., second] * cos + x[..., first] * sin
    return turned


def rms_norm(x: Any, weight: Any, eps: float) -> Any:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def softmax(scores: Any) -> Any:
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)
