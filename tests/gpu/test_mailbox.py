"""Queries gathered through mailboxes: by ranks that share a GPU, and by two processes."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

import pytest
from sanitizer import sanitizer

PROGRAMS = pathlib.Path(__file__).parent / "programs"
ROOT = pathlib.Path(__file__).parents[2]
ENVIRONMENT = os.environ | {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "PYTHONPATH": os.pathsep.join([str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]),
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}


def printed_by(*command: object, **environment: str) -> str:
    """What a program prints that ends well."""
    run: subprocess.CompletedProcess[str] = subprocess.run(
        [str(part) for part in command],
        env=ENVIRONMENT | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout[-8000:]
    return run.stdout


def virtual_ranks(*arguments: object, under: Sequence[str] = ()) -> str:
    """Runs a case in a process of its own; returns what it printed."""
    printed = printed_by(*under, sys.executable, PROGRAMS / "virtual_ranks.py", *arguments)
    assert "done" in printed
    return printed


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


def test_the_example_decodes_in_two_processes() -> None:
    one_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    example = ROOT / "examples" / "dcp_decode.py"
    printed = printed_by(sys.executable, example, "--mailbox", CUDA_VISIBLE_DEVICES=one_gpu)
    assert "the CUDA kernel" in printed
    for process in range(2):
        assert printed.count(f"process {process}, interleave") == 2
