"""Where the build products of the package are."""

import sys
from pathlib import Path

from jax_mla.errors import SetupError

REINSTALL = "Reinstall jax_mla (`pip install --force-reinstall .` in its source folder)."


def locate(name: str) -> Path:
    """Returns the path of a file that the build added to the package.

    An editable install has sources and build products in different folders, both on the package's
    path.

    Args:
        name: path relative to the package, such as "lib/libjax_mla.so".

    Raises:
        SetupError: the file is not there.
    """
    folders = list(sys.modules["jax_mla"].__path__)
    for folder in folders:
        path = Path(folder, name)
        if path.is_file():
            return path
    raise SetupError(f"jax_mla has no {name} in {', '.join(folders)}. {REINSTALL}")
