"""What is installed, and where it is imported from."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
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


def test_the_versions_agree() -> None:
    assert jax_mla.__version__ == importlib.metadata.version("jax_mla")


def test_bare_sources_say_what_to_run(tmp_path: Path) -> None:
    """-S hides the installed packages."""
    ignore = shutil.ignore_patterns("__pycache__", "lib", "cubins")
    shutil.copytree(_ROOT / "jax_mla", tmp_path / "jax_mla", ignore=ignore)
    run = _run("-S", "-c", "import jax_mla", folder=tmp_path)
    assert run.returncode == 1
    last_line = run.stderr.strip().splitlines()[-1]
    assert last_line.startswith("ImportError: "), run.stderr
    assert "pip install ." in last_line
