"""A layer of a decode step on a mesh, data x tensor x decode-context parallel.

Sequences are split over "data" and heads over "tensor" and "dcp". The ranks of "dcp" also split the
cache: each stores some positions of its data shard's sequences. A step is one jitted function with
a donated cache:

    qkv -> q_absorb: own heads; the FP8 queries of the group are gathered; the row goes to its owner
        -> attention of all the group's heads over the positions on this rank
        -> merge over the group, which leaves each rank its own heads -> values un-absorbed

dcp_decode.py runs it.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import PartitionSpec as P

import jax_mla
from jax_mla import dcp

Ints = npt.NDArray[np.int32]

NAMES = ("data", "tensor", "dcp")
AXES = jax_mla.MeshAxes(batch="data", heads="tensor", dcp="dcp")
PARTS = P("dcp", "data", "tensor")  # [D, B, H, ...], attention of each rank over what it stores

Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 1536, 512, 128, 64, 128
COLUMNS, HEAD_ROWS, ROW = Q_RANK + KV_RANK + ROPE, NOPE + ROPE, KV_RANK + ROPE
SOFTMAX_SCALE = HEAD_ROWS**-0.5
Q_SCALE, K_SCALE = 0.02, 0.02  # a stored byte is e4m3(value / scale)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """Weights of one layer, named and laid out as in a checkpoint; all bf16."""

    q_norm: Any  # [1536]
    kv_norm: Any  # [512]
    w_qb: Any  # [H * 192, 1536]
    w_uk: Any  # [H, 128, 512], the key rows of kv_b_proj
    w_uv: Any  # [H, 128, 512], the value rows of kv_b_proj


jax.tree_util.register_dataclass(Layer)


def decode_step(
    layer: Layer,
    qkv: jax.Array,
    cache: jax.Array,
    block_tables: jax.Array,
    positions: jax.Array,
    interleave: int,
    mailbox: jax_mla.DcpMailbox | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One token a sequence, on the mesh in context.

    Args:
        layer: the weights, placed as `MeshAxes.shardings` says; w_uv as w_uk.
        qkv: [B, 2112] bf16, the fused projection.
        cache: [P, S, 576] e4m3, P pages in all, donated.
        block_tables: [B, N] int32, pages of each sequence.
        positions: [B] int32, index of each token in its sequence.
        interleave: consecutive positions on a rank.
        mailbox: through which queries are gathered; None for a collective.

    Returns:
        (output, q, cache): output is [B, H, 128] f32, before the output projection.
    """
    tokens = qkv, cache, block_tables, positions
    outs, lses, q, cache = attend_by_rank(layer, *tokens, interleave, mailbox)
    return merge(outs, lses, layer.w_uv), q, cache


def attend_by_rank(
    layer: Layer,
    qkv: jax.Array,
    cache: jax.Array,
    block_tables: jax.Array,
    positions: jax.Array,
    interleave: int,
    mailbox: jax_mla.DcpMailbox | None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """A step up to the merge, (outs, lses, q, cache): with a mailbox it has no collective."""
    q, cache = store(layer, qkv, cache, block_tables, positions, interleave, mailbox)
    specs = AXES.specs()

    def on_each_rank(
        q: jax.Array, cache: jax.Array, tables: jax.Array, lengths: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        rank = jax.lax.axis_index("dcp")
        local = dcp.local_lengths(lengths, jax.lax.axis_size("dcp"), interleave)[rank]
        out, lse = attend(q, cache, tables, local)
        return out[None], lse[None]

    attention = jax.shard_map(
        on_each_rank,
        in_specs=(specs.q, specs.cache, P("data"), P("data")),
        out_specs=(PARTS, PARTS),
    )
    return *attention(q, cache, block_tables, positions + 1), q, cache


def merge(outs: jax.Array, lses: jax.Array, w_uv: jax.Array) -> jax.Array:
    """The output from all ranks' parts: [D, B, H, 512] and [D, B, H]."""

    def on_each_rank(outs: jax.Array, lses: jax.Array, w_uv: jax.Array) -> jax.Array:
        latents, _ = dcp.merge(outs[0], lses[0], "dcp")
        return unabsorb(latents, w_uv)

    merged = jax.shard_map(
        on_each_rank,
        in_specs=(PARTS, PARTS, AXES.specs().w_uk),
        out_specs=P("data", ("tensor", "dcp")),
    )
    return merged(outs, lses, w_uv)


def store(
    layer: Layer,
    qkv: jax.Array,
    cache: jax.Array,
    block_tables: jax.Array,
    positions: jax.Array,
    interleave: int,
    mailbox: jax_mla.DcpMailbox | None,
) -> tuple[jax.Array, jax.Array]:
    """Queries of some tokens, and the cache with their rows: all that a prefill needs of a step."""
    page_size, ranks = cache.shape[1], jax.sharding.get_abstract_mesh().shape["dcp"]
    slots = dcp.local_slots(block_tables, positions, page_size, ranks, interleave)
    # Every rank has computed all ranks' slots: each keeps its own.
    slots = jax.reshard(slots, AXES.specs().slots)
    return q_absorb(layer, qkv, cache, slots, axes=AXES, mailbox=mailbox)


def q_absorb(
    layer: Layer, qkv: jax.Array, cache: jax.Array, slots: jax.Array, **options: Any
) -> tuple[jax.Array, jax.Array]:
    weights = layer.q_norm, layer.kv_norm, layer.w_qb, layer.w_uk
    return jax_mla.q_absorb(
        qkv, *weights, cache, slots, q_scale=Q_SCALE, k_scale=K_SCALE, **options
    )


einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def attend(
    q: jax.Array, cache: jax.Array, block_tables: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(out [B, H, 512], lse [B, H]) over the first lengths[b] rows of each sequence's pages."""
    rows = cache[block_tables].reshape(len(block_tables), -1, ROW).astype(jnp.float32) * K_SCALE
    scores = einsum("bhd,btd->bht", q.astype(jnp.float32) * (Q_SCALE * SOFTMAX_SCALE), rows)
    # A page holds whatever its last owner left: rows past the length are masked everywhere.
    stored = jnp.arange(rows.shape[1]) < lengths[:, None]
    scores = jnp.where(stored[:, None], scores, -jnp.inf)
    values = jnp.where(stored[..., None], rows[..., :KV_RANK], 0)
    # Without a row out is NaN here and lse -Inf: the merge leaves such a shard out.
    out = einsum("bht,btl->bhl", jax.nn.softmax(scores), values)
    return out, jax.nn.logsumexp(scores, axis=-1)


def unabsorb(latents: jax.Array, w_uv: jax.Array) -> jax.Array:
    return einsum("bhl,hvl->bhv", latents, w_uv.astype(jnp.float32))


class OnMesh:
    """The layer on all devices of a mesh."""

    def __init__(
        self, layer: Layer, mesh: jax.sharding.Mesh, pages: int, page_size: int, **options: Any
    ) -> None:
        at = AXES.shardings(mesh)
        self._layer = Layer(
            q_norm=place(layer.q_norm, at.q_norm),
            kv_norm=place(layer.kv_norm, at.kv_norm),
            w_qb=place(layer.w_qb, at.w_qb),
            w_uk=place(layer.w_uk, at.w_uk),
            w_uv=place(layer.w_uv, at.w_uk),
        )
        pages *= mesh.shape["data"] * mesh.shape["dcp"]
        self.cache = place(empty_cache(pages, page_size), at.cache)
        self._mesh, self._options = mesh, options
        self._store, self._step = self._jit(store), self._jit(decode_step)

    def _jit(self, function: Any) -> Any:
        return jax.jit(function, static_argnames=(*self._options,), donate_argnames="cache")

    def store(self, qkv: Any, tables: Ints, positions: Ints) -> None:
        _, self.cache = self._call(self._store, qkv, tables, positions)

    def step(self, qkv: Any, tables: Ints, positions: Ints) -> tuple[Any, Any]:
        output, q, self.cache = self._call(self._step, qkv, tables, positions)
        return output, q

    def to_host(self, x: Any) -> npt.NDArray[Any]:
        return np.asarray(x)

    def _call(self, function: Any, *by_token: Any) -> Any:
        by_batch = jax.NamedSharding(self._mesh, P("data"))
        qkv, tables, positions = (place(x, by_batch) for x in by_token)
        with jax.set_mesh(self._mesh):
            return function(self._layer, qkv, self.cache, tables, positions, **self._options)


def place(x: Any, sharding: jax.NamedSharding) -> jax.Array:
    """Puts on each device its part of what every process has; nothing is communicated."""
    return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)


def empty_cache(pages: int, page_size: int) -> Any:
    """NaN everywhere, so that a row that is read before it is written shows."""
    return np.full((pages, page_size, ROW), np.nan, jnp.float8_e4m3fn)
