"""The installed package is tested, and GPU tests are skipped only where there is no GPU."""

import functools
import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

# `python -m pytest` puts the clone's root first: there, jax_mla has neither library nor cubins.
_ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != _ROOT]

import jax  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_num_cpu_devices", 8)  # for meshes

_GPU_REQUIRED = os.environ.get("JAX_MLA_REQUIRE_GPU") == "1"


@functools.cache
def _missing_gpu() -> str | None:
    """Returns why GPU tests cannot run, or None."""
    try:
        jax.devices("cuda")
    except RuntimeError as error:
        return f"no GPU: {error}"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks everything in tests/gpu."""
    folder = _ROOT / "tests" / "gpu"
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.gpu)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a GPU test where there is no GPU."""
    if item.get_closest_marker("gpu") and (reason := _missing_gpu()):
        pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turns any skip of a GPU test into a failure where JAX_MLA_REQUIRE_GPU=1."""
    report = yield
    skipped = report.skipped and not hasattr(report, "wasxfail")
    if _GPU_REQUIRED and skipped and item.get_closest_marker("gpu"):
        report.outcome = "failed"
        report.longrepr = f"skipped although JAX_MLA_REQUIRE_GPU=1: {report.longrepr}"
    return report
