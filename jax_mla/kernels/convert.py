"""Straight-line arithmetic on values in registers: RMSNorm pieces, bf16 in, e4m3 or bf16 out.

FP32 work comes in pairs, which compute capability 10 packs into one instruction; the operations and
their order are the same on every GPU.
"""

from __future__ import annotations

from cutlass import Float32, Uint32, cute
from cutlass.cutlass_dsl import CuTeDSL

from jax_mla.kernels import ptx


def has_packed_fp32() -> bool:
    """Whether the GPU being compiled for has FP32 instructions on register pairs."""
    return CuTeDSL._get_dsl().get_arch_enum().major >= 10


def fma_pair(a, b, c):
    """(a0 b0 + c0, a1 b1 + c1), each rounded once."""
    if has_packed_fp32():
        return cute.arch.fma_packed_f32x2(a, b, c)
    return cute.math.fma(a[0], b[0], c[0]), cute.math.fma(a[1], b[1], c[1])


def mul_pair(a, b):
    """(a0 b0, a1 b1)."""
    if has_packed_fp32():
        return cute.arch.mul_packed_f32x2(a, b)
    return a[0] * b[0], a[1] * b[1]


def dot(a, b, chains):
    """Adds the products of two lists of float32 to four partial sums: element i to sum i % 4."""
    for i in range(0, len(a), 2):
        chain = i // 2 % 2
        pair_a, pair_b = tuple(a[i : i + 2]), tuple(b[i : i + 2])
        chains[chain] = fma_pair(pair_a, pair_b, chains[chain])
    return chains


def new_chains():
    """Four partial sums, as two pairs."""
    return [(Float32(0), Float32(0)), (Float32(0), Float32(0))]


def chain_sum(chains):
    """The sum of four partial sums."""
    (c0, c1), (c2, c3) = chains
    return (c0 + c1) + (c2 + c3)


def normed_words(values, r, gamma):
    """bf16(x * r * gamma), as words: the product in float32, rounded once."""
    words = []
    for i in range(0, len(values), 2):
        scaled = mul_pair(tuple(values[i : i + 2]), (r, r))
        words.append(ptx.pack_bf16(*mul_pair(scaled, tuple(gamma[i : i + 2]))))
    return words


def floats(words):
    """The float32 of words of bf16, in memory order."""
    return [value for word in words for value in ptx.unpack_bf16(word)]


def e4m3_pair(low, high, scale):
    """Two float32 times `scale` as e4m3, `low` in the lower byte."""
    return ptx.pack_e4m3(low * scale, high * scale)


def e4m3_words(values, scale):
    """Float32 values times `scale` as e4m3 words of four, first value in the lowest byte."""
    pairs = [Uint32(e4m3_pair(values[i], values[i + 1], scale)) for i in range(0, len(values), 2)]
    return [pairs[i] | (pairs[i + 1] << 16) for i in range(0, len(pairs), 2)]


def rounded(values, scale):
    """Float32 values as bf16, for `store_values` with this `scale`: floats, or words if None."""
    words = [ptx.pack_bf16(*values[i : i + 2]) for i in range(0, len(values), 2)]
    return words if scale is None else floats(words)


def store_values(pointer, values, scale):
    """Stores 2, 4, 8 or 16 neighbours: e4m3 of floats times `scale`, or words of bf16 if None."""
    if scale is None:
        for i in range(0, len(values), 4):
            ptx.store_global(pointer + 2 * i, values[i : i + 4])
    elif len(values) == 2:
        ptx.store_global_b16(pointer, e4m3_pair(*values, scale))
    else:
        ptx.store_global(pointer, e4m3_words(values, scale))
