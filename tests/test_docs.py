"""The documentation of public names runs, and is whole."""

import doctest
import inspect
import re
from types import ModuleType

import pytest

import jax_mla
from jax_mla import api, sharding

PUBLIC_FUNCTIONS = [
    getattr(jax_mla, name) for name in jax_mla.__all__ if inspect.isfunction(getattr(jax_mla, name))
]


@pytest.mark.parametrize("module", [api, sharding])
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
