"""Several ranks of one mailbox on one GPU: each has its own mailbox, control block and stream.

Needs CUDA_DEVICE_MAX_CONNECTIONS=32 from the start of the process: streams that share a queue would
wait for each other, and ranks that wait for each other's words must not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jax_mla import mailbox_layout as layout
from jax_mla.dcp.rank import make_rank
from jax_mla.runtime import peer_memory
from jax_mla.runtime.device import bindings, call, device, primary_context
from jax_mla.runtime.manifest import shipped
from jax_mla.variants import EXCHANGE, THREADS

MOST_CTAS = 32
NAN_WORD = 0x7F7F7F7F
Bytes = npt.NDArray[np.uint8]


class VirtualRanks:
    """The ranks of a group.

    Args:
        ranks: how many.
        half_bytes: gathered queries of one call that a mailbox can hold.
        timeout: seconds that a call waits.
        undo: takes back what is made here.
    """

    def __init__(
        self, ranks: int, half_bytes: int, timeout: float, undo: contextlib.ExitStack
    ) -> None:
        self.gpu = device(0)
        undo.enter_context(primary_context(self.gpu))
        self.half_bytes, self.undo = half_bytes, undo
        self.function = self._load()
        self.streams = [self._make("cuStreamCreate", "cuStreamDestroy", 1) for _ in range(ranks)]
        boxes = [self.allocate(2 * half_bytes) for _ in range(ranks)]
        # Numbers stand for devices of which there is one only.
        group: Any = tuple(range(ranks))
        self.ranks = [
            make_rank(rank, self.gpu, group, boxes, half_bytes, timeout, undo) for rank in group
        ]

    def _load(self) -> Any:
        kernel = shipped().find(EXCHANGE.key, str(self.gpu.arch))
        library = call(
            "cuLibraryLoadData", shipped().read(kernel), [], [], 0, [], [], 0, task="kernel"
        )
        handle = call("cuLibraryGetKernel", library, kernel.symbol.encode(), task="kernel")
        return call("cuKernelGetFunction", handle, task="kernel")

    def _make(self, create: str, destroy: str, *arguments: Any) -> Any:
        made = call(create, *arguments, task=create)
        self.undo.callback(call, destroy, made, task=destroy)
        return made

    def allocate(self, size: int) -> int:
        return peer_memory.allocate(self.gpu, size, self.undo)

    def write(self, address: int, content: bytes) -> None:
        peer_memory.write(self.gpu, address, content)
        peer_memory.synchronize(self.gpu)

    def read(self, address: int, size: int) -> Bytes:
        content = np.empty(size, np.uint8)
        call("cuMemcpyDtoH", content.ctypes.data, address, size, task="reading")
        return content

    def reset(self) -> None:
        """What DcpMailbox.reset does, for all ranks."""
        self.wait()
        for rank in self.ranks:
            rank.clear()
            rank.set_report(layout.OPEN)

    def wait(self) -> None:
        peer_memory.synchronize(self.gpu)

    def number(self, rank: int, offset: int) -> int:
        """A u32 of a rank's control block."""
        return int(self.read(self.ranks[rank].control + offset, 4).view(np.uint32)[0])

    def is_empty(self, rank: int) -> bool:
        """Whether all words of a rank's mailbox are EMPTY."""
        return bool((self.read(self.ranks[rank].box, 2 * self.half_bytes) == 0xFF).all())

    def launch(self, rank: int, q: int, out: int, batch: int, words: int) -> None:
        """Queues one call of a rank on its stream, as ffi/src/exchange.cc does."""
        driver = bindings()
        config = driver.CUlaunchConfig()
        ctas = min(MOST_CTAS, -(-batch * words * len(self.ranks) // THREADS))
        config.gridDimX, config.gridDimY, config.gridDimZ = ctas, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = THREADS, 1, 1
        config.hStream = self.streams[rank]
        values = [
            np.array([x], dtype)
            for x, dtype in zip(
                (q, out, self.ranks[rank].control, batch, words, NAN_WORD),
                (np.uint64, np.uint64, np.uint64, np.int32, np.int32, np.uint32),
                strict=True,
            )
        ]
        pointers = np.array([value.ctypes.data for value in values], np.uint64)
        call("cuLaunchKernelEx", config, self.function, pointers.ctypes.data, 0, task="launch")

    def fill_later(self, rank: int, address: int, byte: int, size: int) -> None:
        """Queues a memset on a rank's stream."""
        stream = self.streams[rank]
        call("cuMemsetD8Async", address, byte, size, stream, task="poison")

    @contextlib.contextmanager
    def captured(self) -> Iterator[list[Callable[[], None]]]:
        """Records what is queued inside; then the list holds what launches it as one graph."""
        driver = bindings()
        origin = self._make("cuStreamCreate", "cuStreamDestroy", 1)
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        call("cuStreamBeginCapture", origin, mode, task="capture")
        fork = self._event(origin)
        for stream in self.streams:
            call("cuStreamWaitEvent", stream, fork, 0, task="fork")
        launches: list[Callable[[], None]] = []
        yield launches
        for stream in self.streams:
            call("cuStreamWaitEvent", origin, self._event(stream), 0, task="join")
        graph = call("cuStreamEndCapture", origin, task="capture")
        program = call("cuGraphInstantiate", graph, 0, task="capture")
        self.undo.callback(call, "cuGraphExecDestroy", program, task="graph")
        launches.append(lambda: call("cuGraphLaunch", program, origin, task="replay"))

    def _event(self, stream: Any) -> Any:
        event = self._make("cuEventCreate", "cuEventDestroy", 2)  # without timing
        call("cuEventRecord", event, stream, task="event")
        return event


def gathered(queries: Sequence[Bytes]) -> Bytes:
    """What every rank must get: [batch, ranks, bytes] from each rank's [batch, bytes]."""
    return np.stack(queries, axis=1)
