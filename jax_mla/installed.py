"""Where the modules and build products of the package are.

The source folder has no compiled library. A program that runs in a clone finds that folder first
and must use the installed package all the same.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

_LIBRARY = Path("lib", "libjax_mla.so")


def package_path(folders: Iterable[str], search: Sequence[str]) -> list[str]:
    """Returns the folders to import the package's modules from.

    Args:
        folders: where the package was found.
        search: where installed packages are looked for, as sys.path.

    Raises:
        ImportError: neither `folders` nor a package in `search` has the compiled library.
    """
    found = list(folders)
    if any(Path(folder, _LIBRARY).is_file() for folder in found):
        return found
    for entry in search:
        installed = Path(entry, "jax_mla")
        if (installed / _LIBRARY).is_file():
            return [str(installed.resolve())]
    raise ImportError(
        f"{found[0]} holds the sources of jax_mla without its compiled library:"
        f" run `pip install .` in {Path(found[0]).parent} first."
    )
