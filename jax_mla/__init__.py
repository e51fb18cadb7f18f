"""The query half of a Multi-head Latent Attention decode step, in one kernel launch."""

import sys
from importlib.metadata import version

from jax_mla.installed import package_path

__path__ = package_path(__path__, sys.path)

from jax_mla import dcp, runtime
from jax_mla.api import export_checks, q_absorb, supported
from jax_mla.errors import SetupError, UnsupportedError
from jax_mla.sharding import MeshAxes

__all__ = [
    "MeshAxes",
    "SetupError",
    "UnsupportedError",
    "dcp",
    "export_checks",
    "q_absorb",
    "supported",
]
__version__ = version("jax_mla")

runtime.register()
