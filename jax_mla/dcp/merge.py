"""Merging attention over the shards of a decode-context parallel group."""

import jax
import jax.numpy as jnp
from jax import lax


def merge(
    outs: jax.Array, lses: jax.Array, axis: str, *, base2: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Returns attention over all tokens of a group from each rank's attention over its own.

    Every rank calls this inside `jax.shard_map` with partial results for all heads of the group, in
    the order in which `jax_mla.q_absorb` gathers them, and gets whole results for its own heads,
    which are those of its w_uk. With m = max lse_r and weights w_r = exp(lse_r - m), the result is
    sum(w_r * out_r) / sum(w_r) and lse = m + log(sum(w_r)): FlashAttention's rescaling (Dao et al.,
    2022, section 3.1) over ranks. Sums run in float32, in the order of ranks.

    Args:
        outs: [..., D * H, V] of floats, softmax(scores) @ values over this rank's tokens.
        lses: [..., D * H] of floats, log(sum(exp(scores))) over this rank's tokens. -Inf, +Inf and
            NaN all mean that it has none: kernels differ in what they report for no tokens.
        axis: name of the mesh axis that the group spans, of size D.
        base2: lses are base-2 logarithms, as FlashInfer's kernels give them, not natural ones.

    Returns:
        (out, lse): [..., H, V] in the type of outs and [..., H] in float32 or wider, in the base
        of lses. A shard without tokens contributes nothing, even if its outs are NaN; where no
        rank has a token, out is 0 and lse -Inf. Results may be merged again.

    Raises:
        TypeError, ValueError: not floats, shapes that do not fit, or heads that do not divide.

    Example:
        >>> import jax, jax.numpy as jnp, jax_mla
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((1,), ("dcp",))
        >>> whole = jax.shard_map(lambda out, lse: jax_mla.dcp.merge(out, lse, "dcp"),
        ...                       mesh=mesh, in_specs=P(), out_specs=P(None, "dcp"))
        >>> out, lse = whole(jnp.ones((3, 8, 512)), jnp.zeros((3, 8)))
        >>> out.shape, lse.shape
        ((3, 8, 512), (3, 8))
    """
    _check(outs, lses, axis)
    outs_by_rank = _exchange(outs, axis, heads_axis=outs.ndim - 2).astype(jnp.float32)
    lses_by_rank = _exchange(lses, axis, heads_axis=lses.ndim - 1).astype(jnp.float32)
    out, lse = _combine(outs_by_rank, lses_by_rank, base2=base2)
    return out.astype(outs.dtype), lse


def _exchange(x: jax.Array, axis: str, *, heads_axis: int) -> jax.Array:
    """Returns what each rank has for this rank's heads, ranks first: the heads change hands once.

    Half of the work of a reduction over ranks, no more bytes, and an order that does not depend on
    the algorithm of a collective.
    """
    ranks = lax.axis_size(axis)
    shape = (*x.shape[:heads_axis], ranks, -1, *x.shape[heads_axis + 1 :])
    exchanged: jax.Array = lax.all_to_all(
        x.reshape(shape), axis, split_axis=heads_axis, concat_axis=0
    )
    return exchanged


def _combine(outs: jax.Array, lses: jax.Array, *, base2: bool) -> tuple[jax.Array, jax.Array]:
    """Returns (out [..., V], lse [...]) of partial outs [D, ..., V] and lses [D, ...]."""
    exp, log = (jnp.exp2, jnp.log2) if base2 else (jnp.exp, jnp.log)
    lses = jnp.where(jnp.isfinite(lses), lses, -jnp.inf)
    largest = jnp.max(lses, axis=0)
    # -Inf - -Inf is NaN: where no shard has a token any finite number keeps the weights at 0.
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    weights = exp(lses - largest)
    total = jnp.sum(weights, axis=0)
    # Selected, not multiplied: 0 * NaN is NaN.
    weighted = jnp.where(weights[..., None] > 0, weights[..., None] * outs, 0)
    out = jnp.sum(weighted, axis=0) / jnp.where(total > 0, total, 1)[..., None]
    return out, largest + log(total)


def _check(outs: jax.Array, lses: jax.Array, axis: str) -> None:
    for name, values in (("outs", outs), ("lses", lses)):
        if not jnp.issubdtype(values.dtype, jnp.floating):
            raise TypeError(f"{name} must be of floats, got {values.dtype}.")
    if outs.ndim < 2:
        raise ValueError(f"outs must be [..., heads, columns], got {list(outs.shape)}.")
    if lses.shape != outs.shape[:-1]:
        raise ValueError(
            f"lses must be {list(outs.shape[:-1])}, one a row of outs, got {list(lses.shape)}."
        )
    ranks, heads = lax.axis_size(axis), outs.shape[-2]
    if heads % ranks:
        raise ValueError(
            f"outs must hold the heads of all {ranks} ranks of mesh axis {axis!r}, got {heads}"
            f" heads, which {ranks} does not divide. Attend with q as q_absorb gathered it."
        )
