"""The FFI library as Python sees it: its C functions, typed."""

import ctypes
import functools
import struct
from pathlib import Path

from jax_mla import variants
from jax_mla.errors import SetupError
from jax_mla.runtime.files import REINSTALL, locate
from jax_mla.runtime.manifest import Kernel

LOADER = ctypes.CFUNCTYPE(None, ctypes.c_int32, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t)
"""Callback (ordinal, key, message, message bytes): loads a kernel or writes why it cannot."""

_ELF64 = b"\x7fELF\x02"
_ELF64_HEADER_BYTES = 64


@functools.cache
def library() -> ctypes.CDLL:
    """Opens the library. It stays open: XLA keeps pointers into it.

    Raises:
        SetupError: the library is missing, cannot be opened, or is not of this version.
    """
    path = locate("lib/libjax_mla.so")
    try:
        _check_whole(path)
        opened = ctypes.CDLL(str(path))
        abi = opened.jax_mla_abi()
        opened.jax_mla_set_loader.argtypes = [LOADER]
        opened.jax_mla_set_loader.restype = None
        opened.jax_mla_add_kernel.argtypes = [
            ctypes.c_int32,
            ctypes.c_char_p,
            ctypes.c_void_p,
            *[ctypes.c_uint32] * 5,
            ctypes.c_bool,
        ]
        opened.jax_mla_add_kernel.restype = None
        opened.jax_mla_add_mailbox.argtypes = [
            ctypes.c_int32,
            ctypes.c_int32,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_uint64,
            ctypes.c_uint32,
        ]
        opened.jax_mla_add_mailbox.restype = None
        opened.jax_mla_remove_mailbox.argtypes = [ctypes.c_int32, ctypes.c_int32]
        opened.jax_mla_remove_mailbox.restype = None
    except (OSError, AttributeError) as error:
        raise SetupError(f"{path} cannot be used: {error}. {REINSTALL}") from error
    if abi != variants.ABI:
        raise SetupError(
            f"{path} has kernel interface {abi}, the Python code {variants.ABI}. {REINSTALL}"
        )
    return opened


def _check_whole(path: Path) -> None:
    """Raises SetupError for a file that was cut short.

    Opening one would end the process: dlopen maps the pages that the header promises, and touching
    one past the end of the file is a bus error. The section headers are what a linker writes last.
    """
    content = path.read_bytes()
    if not (content.startswith(_ELF64) and len(content) >= _ELF64_HEADER_BYTES):
        return  # dlopen names what is wrong with those
    section_headers, entry_bytes, entries = struct.unpack_from("<40xQ10xHH", content)
    needed = section_headers + entry_bytes * entries
    if len(content) < needed:
        raise SetupError(
            f"{path} was cut short: it has {len(content)} bytes, its header says at least {needed}."
            f" {REINSTALL}"
        )


def add_kernel(ordinal: int, kernel: Kernel, function: int) -> None:
    """Makes a loaded kernel callable on a device.

    Args:
        ordinal: the device.
        kernel: how to launch it.
        function: CUfunction of the device's primary context.
    """
    library().jax_mla_add_kernel(
        ordinal,
        kernel.key.encode(),
        function,
        kernel.block,
        kernel.cluster,
        kernel.tokens,
        kernel.shared_memory,
        2 if kernel.form == "bf16" else 1,  # bytes of a query value
        kernel.form != "plain",
    )


def add_mailbox(
    ordinal: int, number: int, *, control: int, report: int, half_bytes: int, ranks: int
) -> None:
    """Makes a rank's mailbox usable by programs that name its number.

    Args:
        ordinal: the rank's device.
        number: of the mailbox, the same on all its devices.
        control: device address of its control block (`jax_mla.mailbox_layout`).
        report: host address of the word to which its REPORT points.
        half_bytes: gathered queries of one call that it can hold.
        ranks: devices that gather together.
    """
    library().jax_mla_add_mailbox(ordinal, number, control, report, half_bytes, ranks)


def remove_mailbox(ordinal: int, number: int) -> None:
    """Makes programs that name a mailbox fail from now on."""
    library().jax_mla_remove_mailbox(ordinal, number)
