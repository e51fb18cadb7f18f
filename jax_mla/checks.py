"""Checks of values while a program runs, on request."""

import logging
from typing import Any

import jax
import numpy as np

from jax_mla import config
from jax_mla.rules import Problem

_log = logging.getLogger("jax_mla")


def report_dropped(slots: jax.Array, problem: Problem) -> None:
    """With JAX_MLA_CHECK_SLOTS=1, logs slots beyond the cache when the program runs."""
    if config.OPTIONS.check_slots:
        jax.debug.callback(_report, slots, rows=problem.rows)


def _report(slots: Any, *, rows: int) -> None:
    slots = np.asarray(slots)
    beyond = np.flatnonzero(slots >= rows)
    if beyond.size:
        first = beyond[0]
        _log.warning(
            "slots must be below P * S = %d, got slots[%d] = %d; %d of %d rows were not stored."
            " Use -1 for a row that must not be stored.",
            rows, first, slots[first], beyond.size, slots.size,
        )  # fmt: skip
