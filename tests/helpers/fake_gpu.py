"""A stand-in for cuda-python's driver module: GPUs whose memory is memory of this host.

Addresses are real, so what one mapping writes another reads, in another process too. Calls that the
driver would refuse are refused, and `live` counts what was made and not freed.
"""

import collections
import ctypes
import dataclasses
import os
from typing import Any

from cuda.bindings import driver as real

GRANULARITY, FILE_NAME = 2 * 1024 * 1024, "fake GPU memory"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_NO_ACCESS, _READ_WRITE, _SHARED, _PRIVATE, _FIXED, _ANONYMOUS = 0, 3, 1, 2, 0x10, 0x20


class Refused(Exception):
    """The status that a call returns."""

    def __init__(self, name: str = "CUDA_ERROR_INVALID_VALUE") -> None:
        self.status = getattr(real.CUresult, name)


@dataclasses.dataclass
class Range:
    """Reserved addresses."""

    size: int
    handle: int | None = None
    devices: tuple[int, ...] = ()


def _map(address: int | None, size: int, access: int, flags: int, file: int = -1) -> int:
    found = _libc.mmap(address, size, access, flags, file, 0)
    assert found not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
    return int(found)


class FakeDriver:
    """GPUs 0 to count - 1 of compute capability 9.0.

    Attributes:
        calls: names of all driver calls so far.
        fail_at: number of the call, counted from 0, or name of the calls that fail; or None.
        unconnected: pairs (device, peer) without peer access.
        names: product names by ordinal, where they are not "Fake H200".
        live: number of memory handles, ranges, mappings, device and host allocations.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.calls: list[str] = []
        self.fail_at: int | str | None = None
        self.unconnected: set[tuple[int, int]] = set()
        self.names: dict[int, str] = {}
        self.live: collections.Counter[str] = collections.Counter()
        self._current: list[int] = []
        self._files: dict[int, int] = {}
        self._ranges: dict[int, Range] = {}
        self._allocated: dict[int, tuple[Any, int | None]] = {}

    def __getattr__(self, name: str) -> Any:
        """A driver call that returns its status, or a type or constant of cuda-python."""
        if not name.startswith("cu"):
            return getattr(real, name)
        call = getattr(self, f"_{name}")

        def checked(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            try:
                if self.fail_at in (name, len(self.calls) - 1):
                    raise Refused("CUDA_ERROR_OUT_OF_MEMORY")
                result = call(*arguments)
            except Refused as refused:
                return (refused.status, None)
            return (real.CUresult.CUDA_SUCCESS, *([] if result is None else [result]))

        return checked

    def load(self, device: int, address: int, size: int) -> bytes:
        """What a kernel on a device reads."""
        self._check_reach(device, address, size)
        return ctypes.string_at(address, size)

    def store(self, device: int, address: int, content: bytes) -> None:
        """Lets a kernel on a device write."""
        self._check_reach(device, address, len(content))
        ctypes.memmove(address, content, len(content))

    def _check_reach(self, device: int, address: int, size: int) -> None:
        reached = [
            *((at, r.size) for at, r in self._ranges.items() if device in r.devices),
            *((at, len(m)) for at, (m, d) in self._allocated.items() if d in (device, None)),
        ]
        if not any(at <= address and address + size <= at + length for at, length in reached):
            raise Refused("CUDA_ERROR_ILLEGAL_ADDRESS")

    def _device(self) -> int:
        if not self._current:
            raise Refused("CUDA_ERROR_INVALID_CONTEXT")
        return self._current[-1]

    def _cuInit(self, flags: int) -> None: ...

    def _cuDeviceGet(self, ordinal: int) -> Any:
        if not 0 <= ordinal < self.count:
            raise Refused("CUDA_ERROR_INVALID_DEVICE")
        return real.CUdevice(ordinal)

    def _cuDeviceGetName(self, size: int, device: Any) -> bytes:
        return self.names.get(int(device), "Fake H200").encode().ljust(size, b"\0")

    def _cuDeviceGetAttribute(self, attribute: Any, device: Any) -> int:
        return 9 if "MAJOR" in attribute.name else 0

    def _cuDeviceCanAccessPeer(self, device: Any, peer: Any) -> int:
        return int((int(device), int(peer)) not in self.unconnected)

    def _cuDevicePrimaryCtxRetain(self, device: Any) -> int:
        return int(device)

    def _cuCtxPushCurrent(self, context: int) -> None:
        self._current.append(context)

    def _cuCtxPopCurrent(self) -> int:
        return self._current.pop()

    def _cuCtxSynchronize(self) -> None:
        self._device()

    def _cuMemGetAllocationGranularity(self, properties: Any, option: Any) -> int:
        return GRANULARITY

    def _cuMemCreate(self, size: int, properties: Any, flags: int) -> Any:
        file_type = real.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        on_device = real.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        pinned = real.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        found = properties.requestedHandleTypes, properties.location.type, properties.type
        if size % GRANULARITY or found != (file_type, on_device, pinned):
            raise Refused
        file = os.memfd_create(FILE_NAME)
        os.ftruncate(file, size)
        return self._new_handle(file)

    def _new_handle(self, file: int) -> Any:
        number = len(self._files) + 1
        self._files[number] = file
        self.live["handles"] += 1
        return real.CUmemGenericAllocationHandle(number)

    def _cuMemExportToShareableHandle(self, handle: Any, kind: Any, flags: int) -> int:
        return os.dup(self._file(handle))

    def _cuMemImportFromShareableHandle(self, file: int, kind: Any) -> Any:
        return self._new_handle(os.dup(file))

    def _file(self, handle: Any) -> int:
        if self._files.get(int(handle), -1) < 0:
            raise Refused("CUDA_ERROR_INVALID_HANDLE")
        return self._files[int(handle)]

    def _cuMemRelease(self, handle: Any) -> None:
        os.close(self._file(handle))
        self._files[int(handle)] = -1
        self.live["handles"] -= 1

    def _cuMemAddressReserve(self, size: int, alignment: int, hint: int, flags: int) -> Any:
        if size % GRANULARITY:
            raise Refused
        address = _map(None, size, _NO_ACCESS, _PRIVATE | _ANONYMOUS)
        self._ranges[address] = Range(size)
        self.live["ranges"] += 1
        return real.CUdeviceptr(address)

    def _range(self, address: Any, size: int, *, mapped: bool) -> Range:
        found = self._ranges.get(int(address))
        if found is None or found.size != size or (found.handle is not None) != mapped:
            raise Refused
        return found

    def _cuMemMap(self, address: Any, size: int, offset: int, handle: Any, flags: int) -> None:
        found, file = self._range(address, size, mapped=False), self._file(handle)
        if os.fstat(file).st_size != size or offset:
            raise Refused
        _map(int(address), size, _READ_WRITE, _SHARED | _FIXED, file)
        found.handle = int(handle)
        self.live["mappings"] += 1

    def _cuMemSetAccess(self, address: Any, size: int, access: list[Any], count: int) -> None:
        found = self._range(address, size, mapped=True)
        if len(access) != count:
            raise Refused
        found.devices += tuple(entry.location.id for entry in access)

    def _cuMemUnmap(self, address: Any, size: int) -> None:
        self._range(address, size, mapped=True)
        _map(int(address), size, _NO_ACCESS, _PRIVATE | _ANONYMOUS | _FIXED)
        self._ranges[int(address)] = Range(size)
        self.live["mappings"] -= 1

    def _cuMemAddressFree(self, address: Any, size: int) -> None:
        self._range(address, size, mapped=False)
        _libc.munmap(int(address), size)
        del self._ranges[int(address)]
        self.live["ranges"] -= 1

    def _cuMemAlloc(self, size: int) -> Any:
        return real.CUdeviceptr(self._allocate("device", size, self._device()))

    def _cuMemHostAlloc(self, size: int, flags: int) -> int:
        self._device()
        if not flags & real.CU_MEMHOSTALLOC_DEVICEMAP:
            raise Refused
        return self._allocate("host", size, None)

    def _allocate(self, kind: str, size: int, owner: int | None) -> int:
        memory = ctypes.create_string_buffer(b"\xab" * size, size)
        self._allocated[ctypes.addressof(memory)] = memory, owner
        self.live[kind] += 1
        return ctypes.addressof(memory)

    def _cuMemFree(self, address: Any) -> None:
        self._free("device", int(address))

    def _cuMemFreeHost(self, address: int) -> None:
        self._free("host", address)

    def _free(self, kind: str, address: int) -> None:
        self._device()
        if self._allocated.pop(address, None) is None:
            raise Refused
        self.live[kind] -= 1

    def _cuMemHostGetDevicePointer(self, address: int, flags: int) -> Any:
        self._device()
        return real.CUdeviceptr(address)

    def _cuMemsetD8(self, address: Any, byte: int, size: int) -> None:
        self._check_reach(self._device(), int(address), size)
        ctypes.memset(int(address), byte, size)

    def _cuMemcpyHtoD(self, address: Any, content: bytes, size: int) -> None:
        self.store(self._device(), int(address), content[:size])
