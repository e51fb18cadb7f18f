"""Prints the include folders of the XLA FFI and of cuda.h, one a line, for CMake.

Neither package is imported: importing jaxlib would start its native code in the build.
"""

import importlib.metadata
import importlib.util
import sys
from pathlib import Path


def xla_ffi() -> Path:
    """Returns the folder that holds xla/ffi/api/ffi.h."""
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or spec.origin is None:
        sys.exit("jaxlib is not installed: its headers are needed to build the FFI library.")
    return Path(spec.origin).parent / "include"


def cuda() -> Path:
    """Returns the folder that holds cuda.h."""
    try:
        files = importlib.metadata.files("nvidia-cuda-runtime") or []
    except importlib.metadata.PackageNotFoundError:
        sys.exit("nvidia-cuda-runtime is not installed: cuda.h is needed to build the FFI library.")
    header = next((file for file in files if file.name == "cuda.h"), None)
    if header is None:
        sys.exit("nvidia-cuda-runtime holds no cuda.h: install a version from 13 on.")
    return Path(str(header.locate())).parent


if __name__ == "__main__":
    print(xla_ffi(), cuda(), sep="\n")
