"""Programs that outlive the process that traced them."""

import hashlib
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import jax

import jax_mla
from jax_mla.testing import bytes_of, make_inputs

PROGRAMS = pathlib.Path(__file__).parent / "programs"
HEADS, BATCH = 6, 3


def run(program: str, *arguments: object, **environment: str) -> dict[str, Any]:
    """The JSON that a program of tests/gpu/programs prints last."""
    process = subprocess.run(
        [sys.executable, PROGRAMS / program, *map(str, arguments)],
        env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def digest_here() -> str:
    """What the programs print: the SHA-256 of q's and the cache's bytes."""
    inputs = make_inputs(BATCH, HEADS, pages=5, page_size=16)
    results = jax.jit(lambda **x: jax_mla.q_absorb(**x, implementation="cuda"))(**inputs)
    return hashlib.sha256(b"".join(bytes_of(result).tobytes() for result in results)).hexdigest()


def test_the_persistent_compilation_cache_serves_a_second_process(tmp_path: pathlib.Path) -> None:
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    first = run("cached_call.py", BATCH, HEADS, **cache)
    second = run("cached_call.py", BATCH, HEADS, **cache)
    assert (first["hits"], second["hits"]) == (0, 1)
    assert first["digest"] == second["digest"] == digest_here()


def test_a_program_exported_without_a_gpu_runs_in_a_fresh_process(tmp_path: pathlib.Path) -> None:
    exported = tmp_path / "q_absorb.bin"
    run("export_call.py", BATCH, HEADS, exported, JAX_PLATFORMS="cpu", CUDA_VISIBLE_DEVICES="")
    assert run("exported_call.py", BATCH, HEADS, exported)["digest"] == digest_here()
