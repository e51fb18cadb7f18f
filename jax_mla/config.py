"""Environment options, read once when the package is imported."""

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the environment asks for.

    Attributes:
        check_slots: JAX_MLA_CHECK_SLOTS=1 makes every call report slots beyond the cache, whose
            rows are dropped in silence otherwise. It costs a host callback a call.
    """

    check_slots: bool


def parse(environment: Mapping[str, str]) -> Options:
    """Reads the options from environment variables.

    Raises:
        ValueError: a variable has a value that means nothing.
    """
    return Options(check_slots=_flag(environment, "JAX_MLA_CHECK_SLOTS"))


def _flag(environment: Mapping[str, str], name: str) -> bool:
    value = environment.get(name, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{name} must be 0 or 1, got {value!r}. Unset it for 0.")
    return value == "1"


OPTIONS = parse(os.environ)
