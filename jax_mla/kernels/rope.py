"""RoPE on pairs of values, by rows of a table of cosines and sines."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint16, Uint32, cute

from jax_mla.kernels import ptx
from jax_mla.kernels.convert import e4m3_pair, fma_pair, mul_pair
from jax_mla.kernels.pair_order import NONE, PAIRS, column


def load_position(options, token):
    """The token's position, as the caller gave it; None in the plain form."""
    if options is None:
        return None
    return ptx.load_global_b32_if(options.style, options.positions + token, Int32)


def table_row(options, position):
    """Pointer to the row of a position: the first row or the last one for those outside."""
    row = cutlass.max(cutlass.min(position, options.table_rows - 1), 0)
    return options.cos_sin + Int64(row) * (2 * PAIRS)


def load_angle(options, position, pair):
    """(cos, sin) of a pair."""
    cos = table_row(options, position) + pair
    return [ptx.load_global_b32_if(options.style, at, Float32) for at in (cos, cos + PAIRS)]


@cute.jit
def rotate(options, word, angle):
    """(x0 cos - x1 sin, x1 cos + x0 sin) of a pair (x0, x1), words of bf16; the pair without RoPE.

    In float32: the products with cos first, rounded, then a fused multiply-add.
    """
    cos, sin = angle
    x0, x1 = ptx.unpack_bf16(word)
    rotated = fma_pair((-x1, x0), (sin, sin), mul_pair((x0, x1), (cos, cos)))
    result = ptx.pack_bf16(*rotated)
    if options.style == NONE:
        result = word
    return result


def load_pair(options, row, pair):
    """A pair of the 64 values at `row`, as a word of bf16."""
    places = [row + column(pair, element, options.style) for element in range(2)]
    first, second = [ptx.load_global_b16(place) for place in places]
    return Uint32(first) | (Uint32(second) << 16)


def store_pair(options, row, pair, word, scale):
    """Stores a pair among the 64 values at `row`: e4m3 of it times `scale`, bf16 if None."""
    places = [row + column(pair, element, options.style) for element in range(2)]
    if scale is None:
        ptx.store_global_b16(places[0], Uint16(word))
        ptx.store_global_b16(places[1], Uint16(word >> 16))
    else:
        values = e4m3_pair(*ptx.unpack_bf16(word), scale)
        ptx.store_global_b8(places[0], values)
        ptx.store_global_b8(places[1], values >> 8)
