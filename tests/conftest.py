"""The installed package is tested; tests that need more are skipped only where it is missing."""

import functools
import importlib.util
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

_REQUIRE = {"gpu": "JAX_MLA_REQUIRE_GPU", "transformers": "JAX_MLA_REQUIRE_TRANSFORMERS"}
"""Variables that, at 1, turn a skip of a test with this mark into a failure."""


@functools.cache
def _missing_gpu() -> str | None:
    """Returns why GPU tests cannot run, or None."""
    try:
        jax.devices("cuda")
    except RuntimeError as error:
        return f"no GPU: {error}"
    return None


def _missing_transformers() -> str | None:
    """Returns why tests against transformers cannot run, or None."""
    missing = [name for name in ("torch", "transformers") if not importlib.util.find_spec(name)]
    return f"not installed: {', '.join(missing)}" if missing else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks everything in tests/gpu."""
    folder = _ROOT / "tests" / "gpu"
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.gpu)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test where what it needs is missing."""
    if item.get_closest_marker("gpu") and (reason := _missing_gpu()):
        pytest.skip(reason)
    if item.get_closest_marker("transformers") and (reason := _missing_transformers()):
        pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turns any skip of a test into a failure where its variable says so."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        for mark, variable in _REQUIRE.items():
            if os.environ.get(variable) == "1" and item.get_closest_marker(mark):
                report.outcome = "failed"
                report.longrepr = f"skipped although {variable}=1: {report.longrepr}"
    return report
