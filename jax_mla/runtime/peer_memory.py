"""GPU memory that others write to: further devices of this process, and further processes.

Devices and processes reach the physical memory of a GPU through mappings of their own, and it lives
until the last of these is gone: nobody can take memory away from one that still writes to it.

Addresses and sizes in bytes are plain numbers. What a function makes, `undo` takes back.
"""

import contextlib
import itertools
import os
from collections.abc import Sequence
from typing import Any

from jax_mla.errors import WITHOUT_MAILBOX, UnsupportedError
from jax_mla.runtime.device import Device, bindings, call, primary_context


def check_peers(devices: Sequence[Device]) -> None:
    """Checks that devices can write to each other's memory.

    Raises:
        UnsupportedError: one is a part of a GPU (MIG), or two are not connected.
    """
    for found in devices:
        # CUDA has no attribute for it, but the driver names a part after the GPU and its share:
        # "NVIDIA A100-SXM4-40GB MIG 1g.5gb".
        if "MIG" in found.name.split():
            raise UnsupportedError(
                f"{found} is a part of a GPU (MIG), which no other device can write to."
                f" Use whole GPUs, or {WITHOUT_MAILBOX}"
            )
    for found, other in itertools.permutations(devices, 2):
        task = f"access of {found} to {other}"
        if not call("cuDeviceCanAccessPeer", found.handle, other.handle, task=task):
            raise UnsupportedError(
                f"{found} cannot write to the memory of {other}."
                f" Use GPUs that NVLink or PCIe connects, or {WITHOUT_MAILBOX}"
            )


def padded(size: int, devices: Sequence[Device]) -> int:
    """Returns the size to create for `size` bytes on any of the devices."""
    minimum = bindings().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    granularities = (
        call(
            "cuMemGetAllocationGranularity",
            _properties(found),
            minimum,
            task=f"granularity of memory on {found}",
        )
        for found in devices
    )
    unit = max(granularities)
    return int(-(-size // unit) * unit)


def create(found: Device, size: int, undo: contextlib.ExitStack) -> Any:
    """Returns a handle of new memory of a device; `size` is padded."""
    task = f"mailbox of {size} bytes on {found}"
    handle = call("cuMemCreate", size, _properties(found), 0, task=task)
    undo.callback(call, "cuMemRelease", handle, task=task)
    return handle


def export_file(handle: Any, undo: contextlib.ExitStack) -> int:
    """Returns an open file that stands for memory in other processes."""
    task = "handing a mailbox to another process"
    file: int = call("cuMemExportToShareableHandle", handle, _file_type(), 0, task=task)
    undo.callback(os.close, file)
    return file


def import_file(file: int, undo: contextlib.ExitStack) -> Any:
    """Returns a handle of the memory that a file from another process stands for."""
    task = "mailbox of another process"
    handle = call("cuMemImportFromShareableHandle", file, _file_type(), task=task)
    undo.callback(call, "cuMemRelease", handle, task=task)
    return handle


def map_memory(
    handle: Any, size: int, readers: Sequence[Device], undo: contextlib.ExitStack
) -> int:
    """Returns the address of memory in this process, the same for all devices that may use it."""
    task = f"access to a mailbox from {', '.join(map(str, readers))}"
    address = call("cuMemAddressReserve", size, 0, 0, 0, task=task)
    undo.callback(call, "cuMemAddressFree", address, size, task=task)
    call("cuMemMap", address, size, 0, handle, 0, task=task)
    undo.callback(call, "cuMemUnmap", address, size, task=task)
    access = [_access(found) for found in readers]
    call("cuMemSetAccess", address, size, access, len(access), task=task)
    return int(address)


def allocate(found: Device, size: int, undo: contextlib.ExitStack) -> int:
    """Returns the address of memory that only its own device uses."""
    task = f"control block on {found}"
    with primary_context(found):
        address = call("cuMemAlloc", size, task=task)
        undo.callback(_in_context, found, "cuMemFree", address, task=task)
    return int(address)


def allocate_word(found: Device, undo: contextlib.ExitStack) -> tuple[int, int]:
    """Returns the addresses for the host and for the device of 4 bytes that both see."""
    driver = bindings()
    task = f"report word of {found}"
    flags = driver.CU_MEMHOSTALLOC_DEVICEMAP | driver.CU_MEMHOSTALLOC_PORTABLE
    with primary_context(found):
        host = call("cuMemHostAlloc", 4, flags, task=task)
        undo.callback(_in_context, found, "cuMemFreeHost", host, task=task)
        return int(host), int(call("cuMemHostGetDevicePointer", host, 0, task=task))


def fill(found: Device, address: int, byte: int, size: int) -> None:
    """Sets every byte of memory that the device may use; `synchronize` waits for it."""
    _in_context(found, "cuMemsetD8", address, byte, size, task=f"filling a mailbox of {found}")


def write(found: Device, address: int, content: bytes) -> None:
    """Copies bytes into memory that the device may use; `synchronize` waits for it."""
    task = f"writing to {found}"
    _in_context(found, "cuMemcpyHtoD", address, content, len(content), task=task)


def synchronize(found: Device) -> None:
    """Waits for all that a device was given to do."""
    _in_context(found, "cuCtxSynchronize", task=f"waiting for {found}")


def _in_context(found: Device, name: str, *arguments: Any, task: str) -> None:
    with primary_context(found):
        call(name, *arguments, task=task)


def _properties(found: Device) -> Any:
    driver = bindings()
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.requestedHandleTypes = _file_type()
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = int(found.handle)
    return properties


def _access(found: Device) -> Any:
    driver = bindings()
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = int(found.handle)
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def _file_type() -> Any:
    return bindings().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
