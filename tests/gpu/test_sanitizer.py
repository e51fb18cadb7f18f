"""compute-sanitizer on every shipped kernel: no access out of bounds, no race in shared memory."""

import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest
from sanitizer import sanitizer

from jax_mla import variants

PROGRAM = pathlib.Path(__file__).parent / "programs" / "every_variant.py"
BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
CHECKS = ("memcheck", "racecheck", "synccheck")
CALLS = 2 * 7 * len(variants.PLAIN_VARIANTS)
"""Two batches, seven kinds of call."""


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """All checks, started together: each spends most of its time on one CPU core."""
    search_path = os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
    # One allocation for each array: an access past its end is out of bounds, not in a neighbour.
    environment = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "PYTHONPATH": search_path}
    started = {
        check: subprocess.Popen(
            [*sanitizer(check), sys.executable, str(PROGRAM)],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for check in CHECKS
    }
    yield started
    for process in started.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("check", CHECKS)
def test_compute_sanitizer_finds_nothing(
    runs: dict[str, subprocess.Popen[str]], check: str
) -> None:
    output, _ = runs[check].communicate(timeout=900)
    assert runs[check].returncode == 0, output[-8000:]
    assert f"calls {CALLS}" in output
    assert "ERROR SUMMARY: 0 errors" in output or "0 hazards displayed" in output
