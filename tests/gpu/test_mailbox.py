"""Queries gathered through mailboxes: by ranks that share a GPU, and by two processes."""

import os
import pathlib
import signal
import socket
import subprocess
import sys

import pytest
from sanitizer import sanitizer

PROGRAMS = pathlib.Path(__file__).parent / "programs"
BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
ENVIRONMENT = os.environ | {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")]),
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}


def virtual_ranks(*arguments: object, under: list[str] | None = None) -> str:
    """Runs a case in a process of its own; returns what it printed."""
    program = [sys.executable, str(PROGRAMS / "virtual_ranks.py"), *map(str, arguments)]
    run: subprocess.CompletedProcess[str] = subprocess.run(
        [*(under or []), *program],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout[-8000:]
    assert "done" in run.stdout
    return run.stdout


@pytest.mark.parametrize(
    ("case", "ranks"),
    [*((case, n) for case in ("any_order", "graphs") for n in (2, 4, 8)),
     ("missing", 2), ("missing", 3)],
)  # fmt: skip
def test_ranks_that_share_the_gpu_get_each_others_bytes(case: str, ranks: int) -> None:
    virtual_ranks(case, ranks)


def test_memcheck_finds_nothing() -> None:
    assert "ERROR SUMMARY: 0 errors" in virtual_ranks("few", 2, under=sanitizer("memcheck"))


def test_two_processes_get_each_others_bytes() -> None:
    """The second kills itself at the end; the first is told, and ends well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = [
        subprocess.Popen(
            [sys.executable, PROGRAMS / "mailbox_pair.py", str(process), str(port)],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in range(2)
    ]
    try:
        printed = [process.communicate(timeout=300)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    ends = [process.returncode for process in running]
    assert ends == [0, -signal.SIGKILL], "\n".join(text[-6000:] for text in printed)
    assert "done" in printed[0]


def test_the_example_decodes_in_two_processes_that_share_the_gpu() -> None:
    example = pathlib.Path(__file__).parents[2] / "examples" / "dcp_decode.py"
    run = subprocess.run(
        [sys.executable, example, "--mailbox", "--mesh", "1", "1", "2"],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout[-8000:]
    assert run.stdout.endswith("ok\n")
