"""`python -m jax_mla`: what is installed, what GPU there is, and whether the kernels run on it."""

import importlib.metadata
import platform
import sys
from collections import Counter

from jax_mla.errors import SetupError
from jax_mla.runtime.device import Device, call, device, driver_version, gpu_present
from jax_mla.runtime.library import library
from jax_mla.runtime.loader import check_driver
from jax_mla.runtime.manifest import shipped
from jax_mla.variants import RUN_ON_HARDWARE


def main() -> int:
    """Prints the report; returns 1 when something that should work does not, else 0."""
    _print_versions()
    healthy = True
    for print_section in (_print_library, _print_cubins, _print_devices):
        try:
            print_section()
        except SetupError as error:
            print(f"  NOT USABLE: {error}")
            healthy = False
    return 0 if healthy else 1


def _print_versions() -> None:
    print(f"python {platform.python_version()}, {platform.platform()}")
    for package in ("jax_mla", "jax", "jaxlib", "jax-cuda13-plugin", "cuda-bindings"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        print(f"{package} {version}")


def _print_library() -> None:
    print("library:")
    opened = library()
    print(f"  {opened._name}, kernel interface {opened.jax_mla_abi()}")


def _print_cubins() -> None:
    print("cubins:")
    manifest = shipped()
    for kernel in manifest.kernels:
        manifest.read(kernel)
    counts = Counter(kernel.arch for kernel in manifest.kernels)
    for arch in manifest.archs:
        state = "run on hardware" if arch in RUN_ON_HARDWARE else "compiled, never run on hardware"
        print(f"  {arch}: {counts[arch]}, {state}")
    built_with = ", ".join(f"{name} {version}" for name, version in manifest.compiler.items())
    print(f"  built with {built_with}: {manifest.path.parent}")


def _print_devices() -> None:
    print("devices:")
    try:
        call("cuInit", 0, task="starting CUDA")
    except SetupError:
        if gpu_present():
            raise
        print("  no NVIDIA GPU: the jax.numpy reference serves every call")
        return
    major, minor = driver_version()
    print(f"  driver for CUDA {major}.{minor}")
    check_driver()
    for ordinal in range(call("cuDeviceGetCount", task="GPUs")):
        print(f"  {_verdict(device(ordinal))}")


def _verdict(found: Device) -> str:
    return f"{found}: supported" if found.arch is not None else f"NOT SUPPORTED: {found.refusal}"


if __name__ == "__main__":
    sys.exit(main())
