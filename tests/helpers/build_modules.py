"""Modules that only the build uses and that are not installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def build_module(name: str) -> ModuleType:
    """Loads a module, such as "kernels/pair_order", from the source tree."""
    path = Path(__file__).parents[2] / "jax_mla" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"jax_mla_build_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
