"""The query half of a Multi-head Latent Attention decode step, in one kernel launch."""

import logging
import sys
from importlib.metadata import version

from jax_mla.installed import package_path

__path__ = package_path(__path__, sys.path)

from jax_mla import dcp, runtime, weights
from jax_mla.api import export_checks, q_absorb, supported
from jax_mla.dcp.mailbox import DcpMailbox
from jax_mla.errors import PeerTimeout, SetupError, UnsupportedError
from jax_mla.rope import Rope
from jax_mla.sharding import MeshAxes

__all__ = [
    "DcpMailbox",
    "MeshAxes",
    "PeerTimeout",
    "Rope",
    "SetupError",
    "UnsupportedError",
    "dcp",
    "export_checks",
    "q_absorb",
    "supported",
    "weights",
]
__version__ = version("jax_mla")

try:
    runtime.register()
except SetupError as error:
    # q_absorb raises it. Here it would also stop `python -m jax_mla`, which is there to report it.
    logging.getLogger("jax_mla").error("%s", error)
