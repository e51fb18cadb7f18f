"""Loading a cubin and handing its kernel to the FFI library."""

import threading
from typing import Any

from jax_mla.errors import SetupError, UnsupportedError
from jax_mla.runtime.device import (
    OLDEST_DRIVER,
    Device,
    bindings,
    call,
    device,
    driver_version,
    primary_context,
)
from jax_mla.runtime.library import add_kernel
from jax_mla.runtime.manifest import Kernel, shipped

_PORTABLE_CLUSTER = 8
"""Largest cluster that every GPU with clusters can launch without opting in."""

# No deadlock: a thread that waits for this lock has released the GIL, and the one that holds it
# releases the GIL inside each driver call and waits for nothing but the driver and the GIL.
# XLA's threads come here too: ffi/src/handlers.cc says why that is safe.
_lock = threading.Lock()
_loaded: set[tuple[int, str]] = set()


def load(key: str, ordinal: int) -> None:
    """Makes a kernel callable on a device. Does nothing when it is; never unloads. Thread-safe.

    Args:
        key: of a variant in the manifest.
        ordinal: the device's number in this process (`jax.Device.local_hardware_id`).

    Raises:
        UnsupportedError: no kernel is shipped for the device, or this one's cluster does not fit.
        SetupError: library, cubin, driver or cuda-python are missing or cannot be used.
    """
    with _lock:
        if (ordinal, key) not in _loaded:
            _load(key, ordinal)
            _loaded.add((ordinal, key))


def _load(key: str, ordinal: int) -> None:
    found = device(ordinal)
    if found.arch is None:
        raise UnsupportedError(found.refusal)
    kernel = shipped().find(key, found.arch)
    cubin = shipped().read(kernel)
    check_driver()
    with primary_context(found):
        function = load_function(kernel, cubin, found)
        _check_cluster(kernel, function, found)
    add_kernel(ordinal, kernel, int(function))


def check_driver() -> None:
    """Raises SetupError when the driver is older than the kernels."""
    needed = int(shipped().compiler["cuda"].split(".")[0])
    major, minor = driver_version()
    if major < needed:
        raise SetupError(
            f"the NVIDIA driver supports CUDA {major}.{minor}, the kernels need CUDA {needed}.0."
            f" Install driver {OLDEST_DRIVER} or newer."
        )


def load_function(kernel: Kernel, cubin: bytes, found: Device) -> Any:
    """Returns the CUfunction, fully loaded: nothing is left to be loaded at the first launch."""
    attributes = bindings().CUfunction_attribute
    task = f"loading kernel '{kernel.key}' for {found}"
    library = call("cuLibraryLoadData", cubin, [], [], 0, [], [], 0, task=task)
    handle = call("cuLibraryGetKernel", library, kernel.symbol.encode(), task=task)
    values = {
        attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: kernel.shared_memory,
        attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: kernel.carveout,
    }
    if kernel.cluster > _PORTABLE_CLUSTER:
        values[attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED] = 1
    for attribute, value in values.items():
        call("cuKernelSetAttribute", attribute, value, handle, found.handle, task=task)
    return call("cuKernelGetFunction", handle, task=task)


def _check_cluster(kernel: Kernel, function: Any, found: Device) -> None:
    """A GPU, or a part of one, may have too few SMs side by side for a cluster."""
    driver = bindings()
    cluster = driver.CUlaunchAttribute()
    cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster.value.clusterDim.x = kernel.cluster
    cluster.value.clusterDim.y = 1
    cluster.value.clusterDim.z = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = kernel.cluster, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = kernel.block, 1, 1
    config.sharedMemBytes = kernel.shared_memory
    config.attrs = [cluster]
    config.numAttrs = 1
    task = f"cluster of kernel '{kernel.key}' on {found}"
    if call("cuOccupancyMaxActiveClusters", function, config, task=task) < 1:
        raise UnsupportedError(
            f"{found} cannot launch kernel '{kernel.key}': it needs {kernel.cluster} SMs side by"
            f" side with {kernel.shared_memory} bytes of shared memory each."
            ' Use a whole GPU instead of a part of one, or implementation="reference".'
        )
