"""The documentation of public names runs, and is whole; the README's table of GPUs is true."""

import doctest
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import jax_mla
from jax_mla import api, rope, sharding, weights
from jax_mla.runtime.manifest import capability_of, shipped
from jax_mla.variants import RUN_ON_HARDWARE

PUBLIC_FUNCTIONS = [
    *(getattr(jax_mla, n) for n in jax_mla.__all__ if inspect.isfunction(getattr(jax_mla, n))),
    weights.from_hf,
    weights.read_layer,
]


@pytest.mark.parametrize("module", [api, rope, sharding])
def test_examples_run(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


def test_every_argument_is_explained() -> None:
    for function in PUBLIC_FUNCTIONS:
        explained = re.findall(r"^ {8}(\w+): ", function.__doc__ or "", re.MULTILINE)
        missing = set(inspect.signature(function).parameters) - set(explained)
        assert not missing, f"{function.__name__} does not explain {missing}"
    assert jax_mla.q_absorb in PUBLIC_FUNCTIONS


def test_the_readme_lists_the_gpus_that_are_shipped_for() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    rows = re.findall(r"^\| (\d+)\.(\d) \| [^|]* \| (\w+)", readme, re.MULTILINE)
    said = {(int(major), int(minor)): state == "tested" for major, minor, state in rows}
    assert said == {capability_of(arch): arch in RUN_ON_HARDWARE for arch in shipped().archs}
