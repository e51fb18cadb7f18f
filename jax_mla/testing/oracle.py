"""What a call must return, in float64 with the specified rounding points."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jax_mla import scalars
from jax_mla.formats import BF16, E4M3, TILE, Form
from jax_mla.rope import Rope
from jax_mla.rules import form_of
from jax_mla.testing.rounding import Doubles, round_to_bf16, round_to_e4m3


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """What a call must return.

    Attributes:
        query: [B, H, 576] of the queries' dtype.
        values: [B, H, 576] float64, the queries over q_scale before they become e4m3.
        cache: as the argument.
        written: [P, S] bool, the rows that the call stores.
        q_latent: [B, 1536] float64, the normalised query latent.
        form: what the call computes.
    """

    query: npt.NDArray[Any]
    values: Doubles
    cache: npt.NDArray[Any]
    written: npt.NDArray[np.bool_]
    q_latent: Doubles
    form: Form


@np.errstate(divide="ignore", invalid="ignore")  # a scale of 0 and rows with Inf are defined
def oracle(
    inputs: Mapping[str, Any],
    q_scale: float = 1.0,
    k_scale: float = 1.0,
    eps: float = 1e-6,
    q_dtype: Any = None,
) -> Oracle:
    """Returns the right results of a call.

    Args:
        inputs: arguments by name, as `make_inputs` gives them. They are copied: a call may take the
            cache by donation afterwards.
        q_scale, k_scale, eps, q_dtype: as for `jax_mla.q_absorb`.

    Raises:
        ValueError: attention does not take such queries and rows.
    """
    x, q_norm, kv_norm, w_qb, w_uk = (
        np.asarray(inputs[name]).astype(np.float64)
        for name in ("qkv", "q_norm", "kv_norm", "w_qb", "w_uk")
    )
    rope = inputs.get("rope")
    form = form_of(
        inputs,
        style=None if rope is None else rope.style,
        q_dtype=scalars.dtype_name("q_dtype", q_dtype),
    )
    size, heads = form.geometry, w_uk.shape[0]
    k_pe = x[:, size.q_rank + size.kv_rank : size.qkv_columns]
    kv_latent = _rms_norm(x[:, size.q_rank : size.q_rank + size.kv_rank], kv_norm, eps)
    q_latent = _rms_norm(x[:, : size.q_rank], q_norm, eps)
    q = round_to_bf16(q_latent @ w_qb.T).reshape(-1, heads, size.head_rows)
    nope, q_pe = q[:, :, : size.nope], q[:, :, size.nope :]
    absorbed = round_to_bf16(np.matmul(nope.transpose(1, 0, 2), w_uk).transpose(1, 0, 2))
    if rope is not None:
        q_pe, k_pe = _rotated(q_pe.swapaxes(0, 1), rope).swapaxes(0, 1), _rotated(k_pe, rope)
    values = np.concatenate([absorbed, q_pe], axis=2)
    if form.q_dtype == E4M3.dtype:
        values = values * _reciprocal(q_scale)
        query = round_to_e4m3(values)
    else:
        query = values.astype(jnp.bfloat16)
    cache = np.array(inputs["cache"])
    flat = cache.reshape(-1, cache.shape[2])
    written = np.zeros(len(flat), np.bool_)
    stored = _stored_rows(kv_latent, k_pe, _reciprocal(k_scale), form)
    for slot, stored_row in zip(np.asarray(inputs["slots"]).tolist(), stored, strict=True):
        if 0 <= slot < len(flat):
            flat[slot] = stored_row
            written[slot] = True
    return Oracle(
        query=query,
        values=values,
        cache=cache,
        written=written.reshape(cache.shape[:2]),
        q_latent=q_latent,
        form=form,
    )


def _rms_norm(x: Doubles, weight: Doubles, eps: float) -> Doubles:
    mean = np.square(x).sum(axis=1, keepdims=True) / x.shape[1]
    return round_to_bf16(x / np.sqrt(mean + float(np.float32(eps))) * weight)


def _rotated(x: Doubles, rope: Rope) -> Doubles:
    """Turns pairs of x [..., B, R] by the angles of their positions."""
    table, positions = np.asarray(rope.cos_sin).astype(np.float64), np.asarray(rope.positions)
    pairs = table.shape[1] // 2
    angles = table[np.clip(positions, 0, len(table) - 1)]
    cos, sin = angles[:, :pairs], angles[:, pairs:]
    places = np.arange(2 * pairs)
    if rope.style == "interleaved":
        first, second = places[0::2], places[1::2]
    else:
        first, second = places[:pairs], places[pairs:]
    rotated = np.empty_like(x)
    rotated[..., first] = x[..., first] * cos - x[..., second] * sin
    rotated[..., second] = x[..., second] * cos + x[..., first] * sin
    return round_to_bf16(rotated)


def _stored_rows(latent: Doubles, k_pe: Doubles, inverse: float, form: Form) -> npt.NDArray[Any]:
    row = np.concatenate([latent, k_pe], axis=1)
    if form.cache == E4M3:
        return round_to_e4m3(row * inverse)
    if form.cache == BF16:
        return row.astype(jnp.bfloat16)
    tiles = latent.reshape(len(latent), -1, TILE)
    largest = np.where(np.isfinite(tiles), np.abs(tiles), 0).max(axis=2, keepdims=True)
    scales = np.exp2(np.ceil(np.log2(np.maximum(largest / 448, 2.0**-13))))
    parts = (
        round_to_e4m3(tiles / scales),
        scales.astype(np.float32),
        k_pe.astype(jnp.bfloat16),
    )
    raw = [part.reshape(len(latent), -1).view(np.uint8) for part in parts]
    return np.concatenate(raw, axis=1)


def _reciprocal(scale: float) -> float:
    return float(np.float32(1) / np.float32(scale))
