"""What several processes do together: exchange values, wait for each other, hand over open files.

Values go through the key-value store of jax.distributed, files through sockets of one host.
"""

import contextlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import jax

from jax_mla.errors import PeerTimeout, SetupError

_FILES_AT_ONCE = 64
_LONGEST_SECONDS = 1e6
_RESTART = "Restart all processes of the program."


def _store() -> Any:
    """Returns the client of the key-value store.

    It has no public name. What is public, `jax.experimental.multihost_utils`, needs all processes
    of the cluster instead of those of a mesh, runs collectives on their devices, and waits forever.

    Raises:
        SetupError: there is none.
    """
    try:
        from jax._src.distributed import global_state

        store = global_state.client
    except (ImportError, AttributeError) as error:
        raise SetupError(
            f"jax {jax.__version__} has no key-value store where it is looked for: {error}."
            " Leave mailbox out, or use a mesh of one process."
        ) from error
    if store is None:
        raise SetupError(
            "a mesh of several processes needs the key-value store of jax.distributed, which was"
            " not started. Call jax.distributed.initialize before anything else."
        )
    return store


class Meeting:
    """Something that processes do together, in steps that all of them take in the same order.

    Use it as a context manager: a process that fails tells the others, which then fail too instead
    of waiting for it.

    Attributes:
        process: this one.
        processes: all, this one included.
        seconds: how long a step waits for the others.
    """

    def __init__(self, key: str, process: int, processes: Sequence[int], seconds: float) -> None:
        """
        Args:
            key: names it in the store; never used before.
            process: this one.
            processes: all, this one included.
            seconds: how long a step waits for the others.
        """
        self.process, self.processes, self.seconds = process, tuple(processes), seconds
        self._key, self._step = key, 0

    def __enter__(self) -> "Meeting":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            # What went wrong is worth more than a store that is gone as well.
            with contextlib.suppress(SetupError):
                self._publish({"failed": f"{type(error).__name__}: {error}"})

    def exchange(self, value: Any) -> dict[int, Any]:
        """Takes a step: returns, by process, the values that all processes brought to it.

        Args:
            value: anything that JSON can hold.

        Raises:
            PeerTimeout: a process did not come in time.
            SetupError: a process failed, or the store did.
        """
        key = f"{self._key}/{self._step}"
        self._publish({"value": value})
        deadline = time.monotonic() + self.seconds
        return {
            process: value if process == self.process else self._read(key, process, deadline)
            for process in self.processes
        }

    def _publish(self, message: dict[str, Any]) -> None:
        """Says what others read where they take this process's next step."""
        if len(self.processes) > 1:
            key = f"{self._key}/{self._step}/{self.process}"
            with _explained("store of jax.distributed", _RESTART):
                _store().key_value_set_bytes(key, json.dumps(message).encode())
        self._step += 1

    def _read(self, key: str, process: int, deadline: float) -> Any:
        seconds = min(max(0.001, deadline - time.monotonic()), _LONGEST_SECONDS)
        milliseconds = round(1000 * seconds)
        try:
            content = _store().blocking_key_value_get_bytes(f"{key}/{process}", milliseconds)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise SetupError(f"store of jax.distributed: {error}. {_RESTART}") from error
            raise PeerTimeout(
                f"process {process} did not come within {self.seconds:g} s. All processes of a"
                " mesh must create, reset and close its mailboxes in the same order: check that"
                " it does, and that it is still running."
            ) from error
        message = json.loads(content)
        if "failed" in message:
            raise SetupError(f"process {process} failed: {message['failed']}")
        return message["value"]


@contextlib.contextmanager
def exchanged_files(
    meeting: Meeting, outgoing: Mapping[int, Sequence[int]]
) -> Iterator[dict[int, list[int]]]:
    """Hands open files to other processes, and gives theirs, by process, for as long as it lasts.

    Every process of the meeting takes part; those that hand over files to each other share a host.

    Args:
        meeting: takes two steps.
        outgoing: by process, the files for it. It must have as many for this process.

    Raises:
        SetupError: a socket cannot be made or reached, or what came is not what was to come.
    """
    if len(meeting.processes) == 1:
        yield {}
        return
    with contextlib.ExitStack() as opened:
        # Only this user can enter the folder, and so connect.
        folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="jax_mla-"))
        inbox = opened.enter_context(_socket(meeting))
        path = os.path.join(folder, "inbox")
        with _explained(f"socket {path}", "Set TMPDIR to a folder of a short name."):
            inbox.bind(path)
            inbox.listen(max(1, len(outgoing)))
        paths = meeting.exchange(path)
        for process, files in outgoing.items():
            remedy = "Processes that share a mailbox need the same TMPDIR and file system."
            with _explained(f"socket of process {process}", remedy), _socket(meeting) as outbox:
                outbox.connect(paths[process])
                socket.send_fds(outbox, [b"%d" % meeting.process], list(files))
        meeting.exchange("sent")  # from here on everything is there: nothing below waits
        yield dict(_receive(inbox, outgoing, opened) for _ in outgoing)


def _receive(
    inbox: socket.socket, expected: Mapping[int, Sequence[int]], opened: contextlib.ExitStack
) -> tuple[int, list[int]]:
    """Returns a process and the files that it sent."""
    with _explained("files of another process", "Create the mailbox again."):
        connection, _ = inbox.accept()
        with connection:
            content, files, _, _ = socket.recv_fds(
                connection, 16, _FILES_AT_ONCE, socket.MSG_CMSG_CLOEXEC
            )
    for file in files:
        opened.callback(os.close, file)
    process = int(content)
    if len(files) != len(expected[process]):
        raise SetupError(
            f"process {process} must send {len(expected[process])} files, got {len(files)}."
            " Raise the limit of open files (ulimit -n)."
        )
    return process, files


def _socket(meeting: Meeting) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(meeting.seconds)
    return made


@contextlib.contextmanager
def _explained(what: str, remedy: str) -> Iterator[None]:
    """Turns an error of the operating system or of the store into one that says what to do."""
    try:
        yield
    except (OSError, jax.errors.JaxRuntimeError) as error:
        raise SetupError(f"{what}: {error}. {remedy}") from error
