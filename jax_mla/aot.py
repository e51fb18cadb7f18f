"""Compiles every kernel ahead of time: cubins and the manifest that describes them.

    python jax_mla/aot.py --out DIRECTORY [--jobs N] [--arch ARCH ...]

Runs in the build only, needs nvidia-cutlass-dsl[cu13] and no GPU. Each cubin is linted
(`jax_mla.sass`); the directory appears whole or not at all. The PTX of each kernel lies beside its
cubin, for tests; it is not installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import shutil
import sys
import tempfile
import time
import types
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parent

if "jax_mla" not in sys.modules:
    # The build needs neither jax nor the package's own __init__: the folder alone is the package.
    sys.modules["jax_mla"] = types.ModuleType("jax_mla")
    sys.modules["jax_mla"].__path__ = [str(SOURCE)]
    # This script's folder is no place to import from: its file names are not top-level modules.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != SOURCE]

from jax_mla import sass  # noqa: E402
from jax_mla.variants import ABI, ARCHS, SHIPPED, THREADS, Variant  # noqa: E402

COMPILER = ("13.4",)
"""Compilers (CUDA versions inside the DSL) whose code passed the GPU tests."""


def require_compiler() -> dict[str, str]:
    """Returns the compiler's versions; refuses one that is known to miscompile these kernels."""
    import cutlass

    found = f"{cutlass.CUDA_VERSION.major}.{cutlass.CUDA_VERSION.minor}"
    if found not in COMPILER:
        raise SystemExit(
            f"nvidia-cutlass-dsl: expected a compiler of CUDA {' or '.join(COMPILER)}, found one of"
            f" CUDA {found} (those before 13.4 miscompile cp.async with an L2 policy)."
            " Install nvidia-cutlass-dsl[cu13] and no other flavour with a newer compiler."
        )
    return {"nvidia-cutlass-dsl": cutlass.__version__, "cuda": found}


def compile_variant(variant: Variant, arch: str, folder: Path) -> dict[str, Any]:
    """Compiles and lints one cubin into `folder`/`arch` and returns its manifest entry."""
    from jax_mla.kernels.host import compile_kernel

    compiled = compile_kernel(variant, arch)
    file = Path(arch) / f"{variant.key}.cubin"
    (folder / arch).mkdir(exist_ok=True)
    (folder / file).write_bytes(compiled.cubin)
    (folder / file).with_suffix(".ptx").write_text(compiled.ptx)
    report = sass.lint(folder / file)
    return {
        "key": variant.key,
        "arch": arch,
        "file": file.as_posix(),
        "sha256": hashlib.sha256(compiled.cubin).hexdigest(),
        "symbol": compiled.symbol,
        "block": THREADS,
        "cluster": variant.cluster,
        "tokens": variant.tokens,
        "form": variant.form,
        "shared_memory": compiled.shared_memory,
        "carveout": 100,
        "registers": report.registers,
        "params": report.params,
    }


def source_hash() -> str:
    """Hash of everything that decides the cubins' bytes, the compiler's version aside."""
    files = [
        *sorted((SOURCE / "kernels").glob("*.py")),
        *(SOURCE / f"{name}.py" for name in ("formats", "geometry", "rules", "variants")),
    ]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def build(out: Path, archs: tuple[str, ...], jobs: int) -> None:
    """Writes cubins and manifest.json to `out`, replacing it."""
    compiler = require_compiler()
    todo = [(variant, arch) for arch in archs for variant in SHIPPED[arch]]
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=out.name, dir=out.parent))
    start = time.monotonic()
    entries: list[dict[str, Any]] = []
    # The DSL is not thread-safe, and fork would copy its threads: spawned processes.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        pending = [pool.submit(compile_variant, v, arch, staging) for v, arch in todo]
        try:
            for done, future in enumerate(as_completed(pending), 1):
                entries.append(entry := future.result())
                print(f"[{done}/{len(todo)}] {entry['arch']} {entry['key']}", flush=True)
        except RuntimeError as error:  # a compiler's or the lint's
            pool.shutdown(cancel_futures=True)
            shutil.rmtree(staging)
            raise SystemExit(f"kernels: {error}") from error
    entries.sort(key=lambda entry: (entry["arch"], entry["key"]))
    manifest = {
        "abi": ABI,
        "source_hash": source_hash(),
        "compiler": compiler,
        "kernels": entries,
    }
    (staging / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    staging.chmod(0o755)
    shutil.rmtree(out, ignore_errors=True)
    staging.rename(out)
    print(f"{len(entries)} cubins in {time.monotonic() - start:.0f} s: {out}", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--arch", nargs="+", default=list(ARCHS), choices=ARCHS)
    arguments = parser.parse_args()
    build(arguments.out.resolve(), tuple(arguments.arch), arguments.jobs)


if __name__ == "__main__":
    main()
