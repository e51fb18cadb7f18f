"""Which of 64 rope columns, or rope rows of a head of Q_B, RoPE rotates together.

Kernels take them in pair order: position 2 j + e holds element e of pair j. Whoever owns positions
2 j and 2 j + 1, neighbours in an MMA fragment too, has both values of a pair, whatever the style.
"""

from jax_mla.rules import ROPE

PAIRS = ROPE // 2

NONE = 0
"""Style of a call without RoPE. The others are 1 + their place in `jax_mla.formats.STYLES`."""


def column(pair, element, style):
    """Column of an element, 0 or 1, of a pair: arithmetic on any kind of integers."""
    half = style >> 1
    return pair * (2 - half) + element * (1 + half * (PAIRS - 1))
