"""compute-sanitizer on every shipped kernel: no access out of bounds, no race in shared memory."""

import glob
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from jax_mla import variants

PROGRAM = pathlib.Path(__file__).parent / "programs" / "every_variant.py"
BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
FOLDERS = ("/usr/local/cuda*/bin", "/usr/local/cuda*/compute-sanitizer", "/opt/nvidia/*/*")


def sanitizer() -> str:
    folders = [folder for pattern in FOLDERS for folder in glob.glob(pattern)]
    search = os.pathsep.join([os.environ.get("PATH", ""), *folders])
    tool = shutil.which("compute-sanitizer", path=search)
    if tool is None:
        pytest.skip("compute-sanitizer is neither on the PATH nor under /usr/local or /opt/nvidia")
    return tool


@pytest.mark.parametrize("check", ["memcheck", "racecheck"])
def test_compute_sanitizer_finds_nothing(check: str) -> None:
    tool = [sanitizer(), "--tool", check, "--error-exitcode", "9"]
    # One allocation for each array: an access past its end is out of bounds, not in a neighbour.
    environment = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "PYTHONPATH": str(BENCHMARKS)}
    run = subprocess.run(
        [*tool, sys.executable, str(PROGRAM)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert f"calls {2 * len(variants.SHIPPED)}" in run.stdout
    assert "ERROR SUMMARY: 0 errors" in run.stdout or "0 hazards displayed" in run.stdout
