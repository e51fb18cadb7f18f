"""Where the modules and build products of the package are.

The source folder has no compiled library. A program that runs in a clone finds that folder first
and must use the installed package all the same.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

_LIBRARY = Path("lib", "libjax_mla.so")


def package_path(folders: Iterable[str], search: Sequence[str]) -> list[str]:
    """Returns the folders to import the package's modules from.

    Only a clone gives way to another folder. An installed package without its library stays what
    it is: another one may be of another version, and its use would hide the damage.

    Args:
        folders: where the package was found.
        search: where installed packages are looked for, as sys.path.

    Raises:
        ImportError: `folders` is a clone's, and no package in `search` has the compiled library.
    """
    found = list(folders)
    complete = any(Path(folder, _LIBRARY).is_file() for folder in found)
    if complete or not any(_is_in_clone(folder) for folder in found):
        return found
    for entry in search:
        installed = Path(entry, "jax_mla")
        if (installed / _LIBRARY).is_file():
            return [str(installed.resolve())]
    raise ImportError(
        f"{found[0]} holds the sources of jax_mla without its compiled library:"
        f" run `pip install .` in {Path(found[0]).parent} first."
    )


def _is_in_clone(folder: str) -> bool:
    return Path(folder).with_name("pyproject.toml").is_file()
