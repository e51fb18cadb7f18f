"""Devices as the CUDA driver sees them, through cuda-python."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from jax_mla.errors import SetupError
from jax_mla.runtime.manifest import capability_of, shipped

OLDEST_DRIVER = "580"
"""First driver branch of CUDA 13, whose cubin format the shipped kernels have."""


_PCI_VENDOR = "0x10de"
_PCI_DISPLAY_CLASS = "0x03"


def gpu_present(root: Path = Path("/")) -> bool:
    """Whether this machine has an NVIDIA GPU, be there a driver for it or not.

    Args:
        root: of the file system.
    """
    if (root / "dev/nvidiactl").exists():
        return True
    return any(
        vendor.read_text().startswith(_PCI_VENDOR)
        and vendor.with_name("class").read_text().startswith(_PCI_DISPLAY_CLASS)
        for vendor in root.glob("sys/bus/pci/devices/*/vendor")
    )


@functools.cache
def bindings() -> ModuleType:
    """Returns cuda-python's driver module; raises SetupError when it is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise SetupError(
            f"cuda-python is needed to load the kernels: {error}."
            " Run `pip install 'cuda-python>=13,<14'`."
        ) from error
    return driver  # type: ignore[no-any-return]


def call(name: str, *arguments: Any, task: str) -> Any:
    """Calls a driver function and returns its result.

    Args:
        name: the function, such as "cuDeviceGet".
        arguments: as cuda-python takes them.
        task: what the call is for; begins the error message.

    Raises:
        SetupError: there is no driver, or the call failed.
    """
    driver = bindings()
    try:
        status, *values = getattr(driver, name)(*arguments)
    except RuntimeError as error:
        # cuda-python's way to say that libcuda, or this function in it, was not found.
        raise SetupError(
            f"{task}: the NVIDIA driver is missing or too old ({name}: {error})."
            f" Install driver {OLDEST_DRIVER} or newer."
        ) from error
    if status != driver.CUresult.CUDA_SUCCESS:
        raise SetupError(
            f"{task}: {name} returned {status.name}."
            " Run `python -m jax_mla` and check what it reports."
        )
    return values[0] if values else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU.

    Attributes:
        ordinal: its number in this process, as XLA and the driver count.
        handle: CUdevice.
        name: product name.
        capability: compute capability.
    """

    ordinal: int
    handle: Any
    name: str
    capability: tuple[int, int]

    @property
    def arch(self) -> str | None:
        """The shipped target that runs here, or None."""
        archs = shipped().archs
        return next((arch for arch in archs if capability_of(arch) == self.capability), None)

    @property
    def refusal(self) -> str:
        """What to tell a user whose device runs no shipped target."""
        needed = ("{}.{} ({})".format(*capability_of(arch), arch) for arch in shipped().archs)
        return (
            f"{self}: kernels are shipped for compute capability {', '.join(needed)}."
            ' Use such a GPU, or implementation="reference".'
        )

    def __str__(self) -> str:
        major, minor = self.capability
        return f"{self.name} (device {self.ordinal}, compute capability {major}.{minor})"


def driver_version() -> tuple[int, int]:
    """Returns the newest CUDA version that the driver supports."""
    version = call("cuDriverGetVersion", task="version of the NVIDIA driver")
    return version // 1000, version % 1000 // 10


def device(ordinal: int) -> Device:
    """Returns a GPU.

    Raises:
        SetupError: there is no driver, cuda-python or device of that number.
    """
    driver = bindings()
    task = f"device {ordinal}"
    call("cuInit", 0, task=task)
    handle = call("cuDeviceGet", ordinal, task=task)
    name = call("cuDeviceGetName", 256, handle, task=task)
    attributes = driver.CUdevice_attribute
    major, minor = (
        call("cuDeviceGetAttribute", attribute, handle, task=task)
        for attribute in (
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )
    return Device(
        ordinal=ordinal,
        handle=handle,
        name=name.split(b"\0")[0].decode(),
        capability=(major, minor),
    )


def unsupported_reason(ordinal: int) -> str | None:
    """Says why no shipped kernel runs on a device, or None when kernels do.

    Args:
        ordinal: the device's number in this process (`jax.Device.local_hardware_id`).

    Raises:
        SetupError: there is no driver, cuda-python or device of that number.
    """
    found = device(ordinal)
    return found.refusal if found.arch is None else None


@contextlib.contextmanager
def primary_context(found: Device) -> Iterator[None]:
    """Makes the device's primary context, the one that XLA uses, current in this thread.

    The reference to the context is kept for good: kernels stay loaded in it.
    """
    task = f"context of device {found.ordinal}"
    context = call("cuDevicePrimaryCtxRetain", found.handle, task=task)
    call("cuCtxPushCurrent", context, task=task)
    try:
        yield
    finally:
        call("cuCtxPopCurrent", task=task)
