"""Rounding of float64 values, once."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]


def round_to_bf16(x: Doubles) -> Doubles:
    """Returns the nearest BF16 values, ties to even, as float64."""
    return _round(x, bits=8, min_exponent=-126)


def round_to_e4m3(x: Doubles) -> npt.NDArray[Any]:
    """Returns the nearest e4m3 values, ties to even, saturating at +-448, any NaN as 0x7F."""
    saturated = np.clip(_round(x, bits=4, min_exponent=-6), -448, 448)
    # A cast keeps the sign of a NaN, so take the positive one.
    rounded: npt.NDArray[Any] = np.where(np.isnan(x), np.nan, saturated)
    return rounded.astype(jnp.float8_e4m3fn)


def _round(x: Doubles, *, bits: int, min_exponent: int) -> Doubles:
    """Rounds to `bits` significant bits; values below 2**min_exponent have the step of that one."""
    exponent = np.maximum(np.frexp(x)[1] - 1, min_exponent) - (bits - 1)
    rounded: Doubles = np.ldexp(np.rint(np.ldexp(x, -exponent)), exponent)
    return rounded
