"""A mesh of several processes gives the bytes of a mesh of one, and those are right."""

import importlib.util
import pathlib
import socket
import subprocess
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from jax_mla.testing import check_cache, check_query, oracle

PROGRAM = pathlib.Path(__file__).parent / "programs" / "mesh_process.py"


def run(processes: int, folder: pathlib.Path) -> dict[str, Any]:
    """Bytes of all 8 devices from so many processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = [
        subprocess.Popen(
            [sys.executable, PROGRAM, *map(str, (processes, process, port)), folder],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in range(processes)
    ]
    try:
        printed = [process.communicate(timeout=120)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * processes, "\n".join(printed)
    results: dict[str, Any] = {}
    for file in folder.glob("*.npz"):
        results |= np.load(file)
    return results


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(1, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mesh_process", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_give_the_same_bytes(
    processes: int, one_process: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    results = run(processes, tmp_path)
    assert len(results) == 16
    assert results.keys() == one_process.keys()
    for name, expected in one_process.items():
        np.testing.assert_array_equal(results[name], expected, err_msg=name)


def test_every_device_has_its_heads_tokens_and_rows(
    one_process: dict[str, Any], program: ModuleType
) -> None:
    inputs = program.global_inputs()
    for place, (shard, group, rank) in enumerate(np.ndindex(2, 2, 2)):
        own = {
            "qkv": np.split(inputs["qkv"], 2)[shard],
            "q_norm": inputs["q_norm"],
            "kv_norm": inputs["kv_norm"],
            "w_qb": np.split(inputs["w_qb"], 2)[group],
            "w_uk": np.split(inputs["w_uk"], 2)[group],
            "cache": np.split(inputs["cache"], 4)[2 * shard + rank],
            "slots": np.split(inputs["slots"][rank], 2)[shard],
        }
        expected = oracle(own, program.Q_SCALE, program.K_SCALE)
        check_query(one_process[f"q {place}"], expected)
        check_cache(one_process[f"cache {place}"], expected)
