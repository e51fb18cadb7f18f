"""Two processes share mailboxes: their fake GPUs reach each other's memory, errors reach both."""

import json
import os
import pathlib
import socket
import subprocess
import sys
from typing import Any

import pytest

TESTS = pathlib.Path(__file__).parent


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What each process printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    search = [str(TESTS / "helpers"), *filter(None, [os.environ.get("PYTHONPATH")])]
    running = [
        subprocess.Popen(
            [sys.executable, TESTS / "programs" / "mailbox_process.py", str(process), str(port)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(search)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    try:
        printed = [process.communicate(timeout=120) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], printed
    return [json.loads(output) for output, _ in printed]


def test_what_one_process_publishes_arrives_in_the_other(found: list[dict[str, Any]]) -> None:
    """Groups by ids in order of ranks: 3 and 0, 1 and 2. Words are sender, receiver, id of it."""
    expected = {
        "0": [[0, 1, 3], [1, 1, 0]],
        "1": [[0, 0, 1], [1, 0, 2]],
        "2": [[0, 1, 1], [1, 1, 2]],
        "3": [[0, 0, 3], [1, 0, 0]],
    }
    for when in ("came", "came after a reset", "came after failures"):
        assert found[0][when] | found[1][when] == expected, when
    for number in ("number", "number after failures"):
        assert found[0][number] == found[1][number] != found[1]["own number"]


def test_closing_frees_own_and_imported_memory(found: list[dict[str, Any]]) -> None:
    """Two control blocks and report words stay."""
    assert [process["left"] for process in found] == [{"device": 2, "host": 2}] * 2


@pytest.mark.parametrize(
    ("attempt", "errors"),
    [
        (
            "disagreement",
            (
                "ValueError: DcpMailbox must have the same max_batch in all processes of its mesh,"
                " got 1 in process 0, 2 in process 1.",
                "ValueError: DcpMailbox must have the same max_batch in all processes of its mesh,"
                " got 2 in process 1, 1 in process 0.",
            ),
        ),
        (
            "failure",
            (
                "SetupError: process 1 failed: SetupError: mailbox of 2097152 bytes on",
                "SetupError: mailbox of 2097152 bytes on",
            ),
        ),
        ("hosts", ("UnsupportedError: a mailbox reaches GPUs of one host, got processes 0 and 1",)),
        (
            "mixed up",
            ("ValueError: DcpMailbox must have the same operation", "ValueError: DcpMailbox must"),
        ),
        ("late", ("PeerTimeout: process 1 did not come within 0.5 s",)),
    ],
)
def test_errors_reach_both_processes(
    found: list[dict[str, Any]], attempt: str, errors: tuple[str, ...]
) -> None:
    for process, error in enumerate(errors):
        assert found[process][attempt].startswith(error), found[process][attempt]
