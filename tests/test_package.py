"""What is installed, and where it is imported from."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import jax_mla
from jax_mla.runtime import files

_ROOT = Path(__file__).resolve().parent.parent
_BUILD_PRODUCTS = ("lib/libjax_mla.so", "cubins/manifest.json")


def _run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )


def test_the_distribution_holds_what_runs() -> None:
    names = {str(path) for path in importlib.metadata.files("jax_mla") or ()}
    assert {f"jax_mla/{name}" for name in _BUILD_PRODUCTS} < names
    assert any(name.endswith(".cubin") for name in names)
    assert not any(name.endswith(".ptx") for name in names)
    assert not {"jax_mla/aot.py", "jax_mla/sass.py", "jax_mla/kernels/__init__.py"} & names


def test_one_wheel_serves_every_python() -> None:
    wheel = importlib.metadata.distribution("jax_mla").read_text("WHEEL")
    assert wheel is not None
    assert re.findall("^Tag: (.*)", wheel, re.MULTILINE)[0].startswith("py3-none-")


def test_running_needs_no_compiler() -> None:
    required = importlib.metadata.requires("jax_mla") or []
    assert [line for line in required if "extra ==" not in line] == ["jax>=0.10", "numpy"]


def test_these_tests_use_the_installed_package() -> None:
    """The folder in the clone has neither library nor cubins."""
    for name in _BUILD_PRODUCTS:
        assert not (_ROOT / "jax_mla" / name).exists()
        assert files.locate(name).is_file()
    assert str(_ROOT) not in sys.path


@pytest.mark.parametrize("folder", [_ROOT, Path("/")], ids=["clone", "elsewhere"])
def test_the_report_uses_the_installed_package(folder: Path) -> None:
    run = _run("-m", "jax_mla", folder=folder)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"jax_mla {importlib.metadata.version('jax_mla')}" in run.stdout
    assert str(files.locate("lib/libjax_mla.so")) in run.stdout
    assert str(files.locate("cubins/manifest.json").parent) in run.stdout


def test_the_installed_version_is_the_one_of_the_sources() -> None:
    sources = tomllib.loads((_ROOT / "pyproject.toml").read_text())
    assert jax_mla.__version__ == sources["project"]["version"]


def test_bare_sources_say_what_to_run(tmp_path: Path) -> None:
    """-S hides the installed packages."""
    ignore = shutil.ignore_patterns("__pycache__", "lib", "cubins")
    shutil.copytree(_ROOT / "jax_mla", tmp_path / "jax_mla", ignore=ignore)
    shutil.copy(_ROOT / "pyproject.toml", tmp_path)
    run = _run("-S", "-c", "import jax_mla", folder=tmp_path)
    assert run.returncode == 1
    last_line = run.stderr.strip().splitlines()[-1]
    assert last_line.startswith("ImportError: "), run.stderr
    assert "pip install ." in last_line


_CALL = """
import jax_mla, jax_mla.testing
try:
    jax_mla.q_absorb(**jax_mla.testing.make_inputs(1, 1))
except jax_mla.SetupError as error:
    print("SetupError:", error)
"""


def _cut_short(library: Path) -> str:
    with library.open("r+b") as file:
        file.truncate(3000)
    return "was cut short: it has 3000 bytes, its header says at least"


def _missing(library: Path) -> str:
    library.unlink()
    return "jax_mla has no lib/libjax_mla.so in"


@pytest.mark.parametrize("damage", [_cut_short, _missing])
def test_a_damaged_installation_says_so(tmp_path: Path, damage: Callable[[Path], str]) -> None:
    """Neither a traceback nor a signal; the intact package further down the path is not taken."""
    copy = tmp_path / "jax_mla"
    for folder in jax_mla.__path__:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
    expected = damage(copy / "lib" / "libjax_mla.so")
    report = _run("-m", "jax_mla", folder=tmp_path)
    assert report.returncode == 1, report.stderr
    [line] = [line for line in report.stdout.splitlines() if "NOT USABLE" in line]
    call = _run("-c", _CALL, folder=tmp_path)
    assert call.returncode == 0, call.stderr
    for text in (line, call.stdout, call.stderr):  # stderr has the log line of the import
        assert expected in text
        assert str(copy) in text
        assert "Reinstall jax_mla" in text
    assert call.stdout.startswith("SetupError: ")
