"""What importing the package does, and which module may import which."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import jax_mla

FOLDERS = [Path(folder) for folder in jax_mla.__path__]

LAYERS = (
    {"config", "errors", "geometry", "installed", "mailbox_layout"},
    {"formats", "hf_config"},
    {"rules", "variants"},
    {"checks", "hf_files", "reference", "rope", "runtime", "scalars"},
    {"dcp", "hf_tensors"},
    {"primitive"},
    {"sharding", "weights"},
    {"api", "testing"},
    {"__init__", "__main__"},
)
"""A module imports from layers before its own; a subpackage also from itself."""

LAYER = {module: number for number, modules in enumerate(LAYERS) for module in modules}
BUILD_ONLY = {"aot", "kernels", "sass"}


def modules() -> Iterator[tuple[str, Path]]:
    """Every run-time source file with its module or subpackage in jax_mla."""
    for folder in FOLDERS:
        for path in sorted(folder.rglob("*.py")):
            module = path.relative_to(folder).with_suffix("").parts[0]
            if module not in BUILD_ONLY:
                yield module, path


def imports(path: Path) -> set[str]:
    """Full names of the modules that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own_imports(path: Path) -> set[str]:
    names = {name.split(".")[1] for name in imports(path) if name.startswith("jax_mla.")}
    return names - {"__version__"}


def test_every_module_has_a_layer() -> None:
    assert {module for module, _ in modules()} == set(LAYER)


def test_imports_go_one_way() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module, path in modules()
        for imported in own_imports(path)
        if imported not in LAYER or (LAYER[imported] >= LAYER[module] and imported != module)
    ]
    assert not wrong


@pytest.mark.parametrize("module", sorted(set.union(*LAYERS[:3])))
def test_the_lowest_layers_need_the_standard_library_only(module: str) -> None:
    (path,) = (path for name, path in modules() if name == module)
    roots = {name.split(".")[0] for name in imports(path)}
    assert roots - {"jax_mla"} <= sys.stdlib_module_names


def test_nothing_at_run_time_needs_the_compiler() -> None:
    roots = {name.split(".")[0] for _, path in modules() for name in imports(path)}
    assert roots - sys.stdlib_module_names == {"cuda", "jax", "jax_mla", "numpy", "safetensors"}


def run(code: str) -> str:
    """What a new process prints that sees no GPU."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_importing_touches_no_driver_compiler_or_device() -> None:
    """JAX takes a number of CPU devices only as long as no backend is up."""
    printed = run(
        "import sys, jax_mla, jax\n"
        "optional = {'cuda', 'cutlass', 'safetensors', 'torch', 'transformers'}\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in optional))\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"
        "print(jax.device_count(), 'libcuda' in open('/proc/self/maps').read())\n"
    )
    assert printed.splitlines() == ["[]", "3 False"]


def test_a_process_without_a_driver_runs_the_reference() -> None:
    printed = run(
        "import jax, jax_mla, jax_mla.testing as t\n"
        "i = t.make_inputs(2, 1)\n"
        "expected = t.oracle(i)\n"
        "q, cache = jax.jit(jax_mla.q_absorb, donate_argnames='cache')(**i)\n"
        "t.check_query(q, expected); t.check_cache(cache, expected); print('ok')\n"
    )
    assert printed == "ok"
