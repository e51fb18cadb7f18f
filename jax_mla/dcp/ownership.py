"""Which rank of a decode-context parallel group stores which token, and where.

The D ranks of a group store one copy of each sequence between them. Positions are dealt out in runs
of I = `interleave`: run k goes to rank k % D. A page number therefore stands for D pages, one on
each rank, which hold S * D consecutive positions of a sequence. The rules are vLLM's
(`vllm/v1/worker/gpu/block_table.py`), so its page tables and caches fit.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

PADDING = -1
"""The position, owner, slot and page of a token that does not exist."""


def owner(position: ArrayLike, dcp: int, interleave: int = 1) -> jax.Array:
    """Returns the rank that stores each position: (position // interleave) % dcp.

    Args:
        position: [...] of any integer type, counted from 0 in its sequence; negative is padding.
        dcp: D, ranks of the group.
        interleave: I, consecutive positions that stay together. 1 balances the ranks best.

    Returns:
        [...] int32, 0 to D - 1; -1 where the position is padding, which no rank owns.

    Raises:
        TypeError, ValueError: position is not of integers, or dcp or interleave is not an int >= 1.

    Example:
        >>> import jax.numpy as jnp, jax_mla
        >>> jax_mla.dcp.owner(jnp.array([0, 1, 2, 3, -1]), dcp=2).tolist()
        [0, 1, 0, 1, -1]
    """
    _check_counts(dcp=dcp, interleave=interleave)
    position = _int32("position", position)
    # Padding is sorted out before the modulo: -1 % D is D - 1, which looks owned.
    return jnp.where(position < 0, PADDING, position // interleave % dcp)


def local_slots(
    block_tables: ArrayLike, positions: ArrayLike, page_size: int, dcp: int, interleave: int = 1
) -> jax.Array:
    """Returns for every rank the cache slot of each token, as `jax_mla.q_absorb` takes slots.

    With o = position % (S * D), a token lies in page block_tables[b, position // (S * D)] of its
    owner, at row o // (I * D) * I + o % I.

    Args:
        block_tables: [B, N] of integers, the pages of each token's sequence in order. One number
            names a page on every rank of the group, counted among the rank's own pages; negative
            means no page.
        positions: [B] of integers, each token's index in its sequence; negative is padding.
        page_size: S, rows of a page on one rank, a multiple of interleave.
        dcp: D, ranks of the group.
        interleave: I, as in `owner`.

    Returns:
        [D, B] int32, page * S + row on the rank that owns the token. -1 on every other rank, and on
        all of them for padding and for positions that the table has no page for.

    Raises:
        TypeError, ValueError: not integers, shapes that do not fit, or a count below 1.

    Example:
        >>> import jax.numpy as jnp, jax_mla
        >>> pages = jnp.array([[7, 5], [2, 3]])  # 16 rows a page on each of 2 ranks
        >>> jax_mla.dcp.local_slots(pages, jnp.array([33, 4]), page_size=16, dcp=2).tolist()
        [[-1, 34], [80, -1]]
    """
    _check_counts(page_size=page_size, dcp=dcp, interleave=interleave)
    if page_size % interleave:
        raise ValueError(
            f"page_size must be a multiple of interleave = {interleave}, got {page_size}:"
            " a run of positions may not cross the end of a page."
        )
    block_tables, positions = _int32("block_tables", block_tables), _int32("positions", positions)
    _check_tables(block_tables, positions)
    block, offset = positions // (page_size * dcp), positions % (page_size * dcp)
    row = offset // (interleave * dcp) * interleave + offset % interleave
    page = _entry(block_tables, block)
    slot = jnp.where(page < 0, PADDING, page * page_size + row)
    return jnp.where(owner(positions, dcp, interleave) == _ranks(dcp, 1), slot, PADDING)


def local_lengths(lengths: ArrayLike, dcp: int, interleave: int = 1) -> jax.Array:
    """Returns how many of each sequence's positions every rank stores.

    L // (I * D) * I + clip(L % (I * D) - rank * I, 0, I): the positions below L that `owner` gives
    the rank, which stores them in order in the sequence's pages.

    Args:
        lengths: [...] of integers, positions of each sequence, this step's token included;
            negative counts as 0.
        dcp: D, ranks of the group.
        interleave: I, as in `owner`.

    Returns:
        [D, ...] int32, whose sum over ranks is lengths.

    Raises:
        TypeError, ValueError: lengths are not integers, or dcp or interleave is not an int >= 1.

    Example:
        >>> import jax.numpy as jnp, jax_mla
        >>> jax_mla.dcp.local_lengths(jnp.array([7, 1, 0]), dcp=2).tolist()
        [[4, 1, 0], [3, 0, 0]]
    """
    _check_counts(dcp=dcp, interleave=interleave)
    lengths = jnp.maximum(_int32("lengths", lengths), 0)
    rounds, rest = lengths // (interleave * dcp), lengths % (interleave * dcp)
    begun = jnp.clip(rest - _ranks(dcp, lengths.ndim) * interleave, 0, interleave)
    return rounds * interleave + begun


def _entry(tables: jax.Array, column: jax.Array) -> jax.Array:
    """Returns tables[b, column[b]], and PADDING for columns that the table does not have.

    A masked maximum, not a gather: it partitions over b on any mesh, and cannot wrap or clamp.
    """
    columns = jnp.arange(tables.shape[1], dtype=jnp.int32)
    return jnp.max(jnp.where(columns == column[:, None], tables, PADDING), axis=1, initial=PADDING)


def _ranks(dcp: int, dimensions: int) -> jax.Array:
    """Returns 0 to D - 1 along a new first axis of an array of so many dimensions."""
    return jnp.arange(dcp, dtype=jnp.int32).reshape(-1, *[1] * dimensions)


def _int32(name: str, values: ArrayLike) -> jax.Array:
    array = jnp.asarray(values)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must be of integers, got {array.dtype}.")
    return array.astype(jnp.int32)


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool):
            raise TypeError(f"{name} must be a Python int, got {type(count).__name__}.")
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}.")


def _check_tables(block_tables: jax.Array, positions: jax.Array) -> None:
    if positions.ndim != 1:
        raise ValueError(f"positions must be [batch], one a token, got {list(positions.shape)}.")
    if block_tables.ndim != 2 or block_tables.shape[0] != positions.shape[0]:
        raise ValueError(
            f"block_tables must be [batch, pages] with batch = {positions.shape[0]} to match"
            f" positions, got {list(block_tables.shape)}."
        )
