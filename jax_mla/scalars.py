"""The checks of options that are plain Python values, known while tracing."""

import math
import numbers
from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

import numpy as np


class Named(Protocol):
    """Something with a name."""

    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=Named)

IMPLEMENTATIONS = ("auto", "cuda", "reference")

_MIN_SCALE, _MAX_SCALE = 2.0**-126, 2.0**126
_MAX_FLOAT32 = (2 - 2.0**-23) * 2.0**127


def check_scale(name: str, scale: float | numbers.Real) -> float:
    """Returns a dequantisation scale that is known while tracing.

    Raises:
        ValueError: it is not finite and positive, or it or its reciprocal is no normal float32.
    """
    scale = _nearest_float(scale)
    if not _MIN_SCALE <= scale <= _MAX_SCALE:
        raise ValueError(
            f"{name} must be finite and positive, 2**-126 to 2**126, got {scale}."
            " Pass the scale that turns stored bytes back into values; 1.0 for none."
        )
    return scale


def _nearest_float(number: float | numbers.Real) -> float:
    """Returns the float that Python's conversion gives, and infinity where that overflows."""
    try:
        return float(number)
    except OverflowError:
        return -math.inf if number < 0 else math.inf


def check_eps(eps: float) -> None:
    """Checks the epsilon of the norms.

    Raises:
        TypeError: it is no Python number.
        ValueError: it is negative or not finite in float32.
    """
    if not isinstance(eps, numbers.Real):
        raise TypeError(
            f"eps must be a Python float, got {type(eps).__name__}."
            " It is compiled into the program: take it from the model's configuration."
        )
    value = _nearest_float(eps)
    if not 0 <= value <= _MAX_FLOAT32:
        raise ValueError(
            f"eps must be finite and at least 0, got {value}. Use the model's rms_norm_eps."
        )


def check_implementation(implementation: str) -> None:
    """Checks the name of an implementation.

    Raises:
        ValueError: there is none of that name.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}."
            ' Leave it out for "auto".'
        )


def check_flag(name: str, flag: Any) -> None:
    """Checks an option that is on or off.

    Raises:
        TypeError: it is neither True nor False.
    """
    if not isinstance(flag, bool):
        raise TypeError(
            f"{name} must be True or False, got {type(flag).__name__}."
            " It fixes the number of results: make it a static argument of jax.jit."
        )


def check_unscaled(name: str, scale: Any, values: str) -> None:
    """Checks that nobody scales what is stored as it is.

    Args:
        name: of the scale.
        scale: as the user gave it.
        values: what it would scale.

    Raises:
        ValueError: it is anything but the number 1.
    """
    if not (isinstance(scale, numbers.Real) and scale == 1):
        found = scale if isinstance(scale, numbers.Real) else type(scale).__name__
        raise ValueError(
            f"{name} must be the Python number 1 with {values}, which are stored as they are, got"
            f" {found}. Leave it out."
        )


def dtype_name(name: str, dtype: Any) -> str | None:
    """Returns the name of a dtype, None for None.

    Raises:
        TypeError: it is no dtype.
    """
    if dtype is None:
        return None
    try:
        return str(np.dtype(dtype).name)
    except TypeError:
        raise TypeError(
            f"{name} must be a dtype, got {dtype!r}. Pass jnp.bfloat16 or jnp.float8_e4m3fn."
        ) from None


def named(name: str, wanted: str, choices: Iterable[N]) -> N:
    """Returns the one of `choices` with a name.

    Raises:
        ValueError: there is none.
    """
    by_name = {choice.name: choice for choice in choices}
    if wanted not in by_name:
        raise ValueError(
            f"{name} must be one of {', '.join(by_name)}, got {wanted!r}. Choose one of them."
        )
    return by_name[wanted]
