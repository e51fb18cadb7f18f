"""Streams, graphs and kernels for the GPUs of `fake_gpu`, one after the other in queued order."""

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from cuda.bindings import driver as real
from fake_gpu import FakeDriver
from fake_kernel import Kernel

from jax_mla import mailbox_layout as layout
from jax_mla.rules import HEAD_ROWS, KV_RANK, NOPE, Q_RANK, QKV_COLUMNS, ROW

_QUERY = [*[ctypes.c_uint64] * 10, *[ctypes.c_int64] * 2, ctypes.c_int32, ctypes.c_float]
_EXCHANGE = [*[ctypes.c_uint64] * 3, *[ctypes.c_int32] * 2, ctypes.c_uint32]


def mixed(rows: Any, w_qb: Any, w_uk: Any) -> Any:
    """[batch, heads, 576] bytes that tell a token, a head and both of its matrices.

    Args:
        rows, w_qb, w_uk: [batch, 2112], [heads, 192, 1536] and [heads, 128, 512] of any bf16.
    """
    parts = (x.view(np.uint8)[..., :ROW] for x in (rows[:, None], w_qb[:, 0], w_uk[:, 0]))
    token, nope, latent = parts
    return (token ^ nope ^ latent) & 0x7E


class FakeLaunches(FakeDriver):
    """One GPU of 132 SMs that runs two CTAs of any kernel on each.

    Attributes:
        silent: ranks whose calls of the exchange are lost.
        grids: of all kernels run: symbol, stream and grid.
        flip: bits by which gathered bytes are wrong.
    """

    def __init__(self) -> None:
        super().__init__(1)
        self.silent: set[int] = set()
        self.grids: set[tuple[str, int, tuple[int, int, int]]] = set()
        self.flip = 0
        self._numbers = itertools.count(1)
        self._captured: list[Callable[[], None]] | None = None
        self._calls: dict[tuple[int, ...], dict[int, tuple[Kernel, bytes, int]]] = {}

    def _cuDeviceGetAttribute(self, attribute: Any, device: Any) -> int:
        is_count = "MULTIPROCESSOR_COUNT" in attribute.name
        return 132 if is_count else super()._cuDeviceGetAttribute(attribute, device)

    def _cuOccupancyMaxActiveBlocksPerMultiprocessor(self, *_: Any) -> int:
        return 2

    def _cuLibraryLoadData(self, *_: Any) -> int:
        return 0

    def _cuLibraryGetKernel(self, library: int, symbol: bytes) -> str:
        return symbol.decode()

    def _cuKernelSetAttribute(self, *_: Any) -> None: ...

    def _cuKernelGetFunction(self, kernel: str) -> str:
        return kernel

    def _cuStreamCreate(self, flags: int) -> Any:
        return real.CUstream(next(self._numbers))

    def _cuEventCreate(self, flags: int) -> int:
        return next(self._numbers)

    def _nothing(self, *_: Any) -> None: ...

    _cuStreamDestroy = _cuEventDestroy = _cuGraphDestroy = _cuGraphExecDestroy = _nothing
    _cuEventRecord = _cuStreamWaitEvent = _nothing

    def _cuStreamBeginCapture(self, stream: Any, mode: Any) -> None:
        self._captured = []

    def _cuStreamEndCapture(self, stream: Any) -> Any:
        captured, self._captured = self._captured, None
        return captured

    def _cuGraphInstantiate(self, graph: Any, flags: int) -> Any:
        return graph

    def _cuGraphLaunch(self, program: Any, stream: Any) -> None:
        for kernel in program:
            kernel()

    def _cuMemcpyDtoH(self, target: int, address: int, size: int) -> None:
        ctypes.memmove(target, self.load(self._device(), address, size), size)

    def _cuCtxSynchronize(self) -> None:
        """Whoever still waits gives up."""
        super()._cuCtxSynchronize()
        for boxes in list(self._calls):
            self._give_up(boxes)

    def _give_up(self, boxes: tuple[int, ...]) -> None:
        waiting = self._calls.pop(boxes)
        missing = next(rank for rank in range(len(boxes)) if rank not in waiting)
        for kernel, _, _ in waiting.values():
            kernel.give_up(missing)

    def _cuLaunchKernelEx(self, config: Any, function: str, pointers: int, extra: int) -> None:
        grid = config.gridDimX, config.gridDimY, config.gridDimZ
        self.grids.add((function, int(config.hStream), grid))
        is_exchange = function.startswith("exchange")
        kinds: list[Any] = _EXCHANGE if is_exchange else _QUERY
        addresses = (ctypes.c_uint64 * len(kinds)).from_address(pointers)
        values = [kind.from_address(at).value for kind, at in zip(kinds, addresses, strict=True)]

        def kernel() -> None:
            if is_exchange:
                self._exchange(*values[:5])
            else:
                self._query(grid[1], *values)

        assert self._captured is not None
        self._captured.append(kernel)

    def _query(self, heads: int, *values: Any) -> None:
        rows, _, _, w_qb, w_uk, cache, _, _, _, q, stride, _, batch, _ = values
        assert stride == QKV_COLUMNS
        tokens, q_rows, k_rows = (
            _bf16(address, shape)
            for address, shape in (
                (rows, (batch, stride)),
                (w_qb, (heads, HEAD_ROWS, Q_RANK)),
                (w_uk, (heads, NOPE, KV_RANK)),
            )
        )
        self.store(0, cache, b"row")
        self.store(0, q, mixed(tokens, q_rows, k_rows).tobytes())

    def _exchange(self, q: int, out: int, control: int, batch: int, words: int) -> None:
        kernel = Kernel(self, 0, control)
        rank, size = kernel.number(layout.RANK), batch * words * layout.WORD_BYTES
        if rank in self.silent or kernel.number(layout.STATE) != layout.OPEN:
            return
        waiting = self._calls.setdefault(kernel.boxes, {})
        if rank in waiting:  # the call before can only have given up
            self._give_up(kernel.boxes)
            return
        waiting[rank] = kernel, self.load(0, q, size), out
        if len(waiting) == len(kernel.boxes):
            sent = [
                np.frombuffer(waiting[r][1], np.uint8).reshape(batch, -1) for r in sorted(waiting)
            ]
            gathered = np.stack(sent, axis=1) ^ self.flip
            for _, _, target in waiting.values():
                self.store(0, target, gathered.astype(np.uint8).tobytes())
            del self._calls[kernel.boxes]


def _bf16(address: int, shape: tuple[int, ...]) -> Any:
    size = 2 * int(np.prod(shape))
    return np.frombuffer(ctypes.string_at(address, size), np.uint16).reshape(shape)
