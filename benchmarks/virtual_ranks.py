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

from jax_mla import PeerTimeout
from jax_mla import mailbox_layout as layout
from jax_mla.dcp.rank import make_rank
from jax_mla.runtime import loader, peer_memory
from jax_mla.runtime.device import bindings, call, device, primary_context
from jax_mla.runtime.manifest import Kernel, shipped
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
        self.half_bytes, self.timeout, self.undo = half_bytes, timeout, undo
        self.exchange, self.function = self.load(EXCHANGE.key)
        self.streams = [self._make("cuStreamCreate", "cuStreamDestroy", 1) for _ in range(ranks)]
        boxes = [self.allocate(2 * half_bytes) for _ in range(ranks)]
        # Numbers stand for devices of which there is one only.
        group: Any = tuple(range(ranks))
        self.ranks = [
            make_rank(rank, self.gpu, group, boxes, half_bytes, timeout, undo) for rank in group
        ]

    def load(self, key: str) -> tuple[Kernel, Any]:
        """How a kernel is launched, and its function, loaded as the package loads it."""
        kernel = shipped().find(key, str(self.gpu.arch))
        return kernel, loader.load_function(kernel, shipped().read(kernel), self.gpu)

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

    def check(self) -> None:
        """Raises PeerTimeout where a call that has completed gave up."""
        for number, rank in enumerate(self.ranks):
            if (missing := rank.missing) is not None:
                raise PeerTimeout(
                    f"virtual rank {number} waited {self.timeout:g} s in vain for rank {missing}."
                    " Not all of their calls ran at once: use fewer ranks."
                )

    def number(self, rank: int, offset: int) -> int:
        """A u32 of a rank's control block."""
        return int(self.read(self.ranks[rank].control + offset, 4).view(np.uint32)[0])

    def is_empty(self, rank: int) -> bool:
        """Whether all words of a rank's mailbox are EMPTY."""
        return bool((self.read(self.ranks[rank].box, 2 * self.half_bytes) == 0xFF).all())

    def ctas(self, batch: int, words: int) -> int:
        """CTAs of one call of a rank, as in ffi/src/exchange.cc."""
        return min(MOST_CTAS, -(-batch * words * len(self.ranks) // THREADS))

    def resident_ctas(self) -> int:
        """CTAs of the exchange that the GPU runs at once."""
        sms = bindings().CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        count = call("cuDeviceGetAttribute", sms, self.gpu.handle, task="SMs")
        occupancy = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        return int(count * call(occupancy, self.function, THREADS, 0, task="occupancy"))

    def launch(self, rank: int, q: int, out: int, batch: int, words: int) -> None:
        """Queues one call of a rank on its stream, as ffi/src/exchange.cc does."""
        pointers = np.array([q, out, self.ranks[rank].control], np.uint64)
        sizes, replacement = np.array([batch, words], np.int32), np.array([NAN_WORD], np.uint32)
        grid = self.ctas(batch, words), 1, 1
        self.queue(rank, self.exchange, self.function, grid, [*pointers, *sizes, *replacement])

    def queue(
        self,
        rank: int,
        kernel: Kernel,
        function: Any,
        grid: tuple[int, int, int],
        parameters: Sequence[np.generic],
    ) -> None:
        """Queues a kernel on a rank's stream, as ffi/src/launch.cc does."""
        driver = bindings()
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = kernel.block, 1, 1
        config.sharedMemBytes = kernel.shared_memory
        config.hStream = self.streams[rank]
        if kernel.cluster > 1:
            cluster = driver.CUlaunchAttribute()
            cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            cluster.value.clusterDim.x = kernel.cluster
            cluster.value.clusterDim.y = 1
            cluster.value.clusterDim.z = 1
            config.attrs, config.numAttrs = [cluster], 1
        held = [np.array([parameter]) for parameter in parameters]
        pointers = np.array([values.ctypes.data for values in held], np.uint64)
        call("cuLaunchKernelEx", config, function, pointers.ctypes.data, 0, task="launch")

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
        call("cuGraphDestroy", graph, task="capture")
        launches.append(lambda: call("cuGraphLaunch", program, origin, task="replay"))

    def _event(self, stream: Any) -> Any:
        event = self._make("cuEventCreate", "cuEventDestroy", 2)  # without timing
        call("cuEventRecord", event, stream, task="event")
        return event


def gathered(queries: Sequence[Bytes]) -> Bytes:
    """What every rank must get: [batch, ranks, bytes] from each rank's [batch, bytes]."""
    return np.stack(queries, axis=1)
