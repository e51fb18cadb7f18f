"""Registering the kernels with XLA."""

import ctypes
import functools

import jax

from jax_mla.errors import SetupError, UnsupportedError
from jax_mla.runtime.library import LOADER, library
from jax_mla.runtime.loader import load

TARGET = "jax_mla_q_absorb"
"""Name of the custom call in lowered programs."""

EXCHANGE_TARGET = "jax_mla_exchange"
"""The same for the gather of queries through mailboxes."""


@functools.cache
def register() -> None:
    """Makes XLA able to run the kernels. Needs no GPU, driver or cuda-python; starts no backend.

    Raises:
        SetupError: the library is missing, cannot be opened, or is not of this version.
    """
    opened = library()
    opened.jax_mla_set_loader(_CALLBACK)
    for target, initialize, execute in (
        (TARGET, opened.JaxMlaQAbsorbInitialize, opened.JaxMlaQAbsorb),
        (EXCHANGE_TARGET, opened.JaxMlaExchangeInitialize, opened.JaxMlaExchange),
    ):
        stages = {
            "initialize": jax.ffi.pycapsule(initialize),
            "execute": jax.ffi.pycapsule(execute),
        }
        jax.ffi.register_ffi_target(target, stages, platform="CUDA")


def _load_for_library(ordinal: int, key: bytes, message: int, message_bytes: int) -> None:
    """Called by the library when a program meets a kernel that its lowering has not loaded."""
    try:
        load(key.decode(), ordinal)
    except Exception as error:  # C cannot pass an exception on: it becomes the text of XLA's error
        expected = isinstance(error, SetupError | UnsupportedError)
        text = (str(error) if expected else repr(error)).encode()[: message_bytes - 1]
        ctypes.memmove(message, text + b"\0", len(text) + 1)


_CALLBACK = LOADER(_load_for_library)
"""Kept for as long as the process runs: the library holds its address."""
