"""The mailbox through which the kernels of a decode-context parallel group exchange queries."""

from types import TracebackType
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from jax_mla import mailbox_layout
from jax_mla.dcp.capacity import Capacity
from jax_mla.dcp.groups import Groups
from jax_mla.dcp.making import PATIENCE, agree, check_devices, make
from jax_mla.errors import PeerTimeout
from jax_mla.runtime.rendezvous import Meeting


class DcpMailbox:
    """GPU memory through which `jax_mla.q_absorb` gathers queries without a collective of JAX.

    Each device of `mesh` gets a mailbox, to which the devices that differ from it along `axis`
    write their queries, those of this process and those of others on the same host. It takes
    2 * max_batch * ranks * heads * 576 bytes of a device (1152 for bfloat16), rounded up to the
    driver's 2 MiB, beside the memory that JAX reserves.

    Making, resetting and closing it are collective: all processes with devices of the mesh do so in
    the same order, from one thread each. A process waits a minute for the others, and in `reset`
    and `close` also for the calls that may still wait for their peers.

    One mailbox serves all layers and programs, and calls of fewer tokens. All ranks must make the
    same calls on it in the same order, one after the other.

    Args:
        mesh: with its devices, all of them NVIDIA GPUs.
        axis: name of the mesh axis over which heads are gathered, of at most 16 devices.
        max_batch: most tokens that a device has in a call.
        heads: of one device.
        q_dtype: of the widest queries to gather, jnp.float8_e4m3fn or jnp.bfloat16.
        timeout: seconds that a call waits for its peers, which may still have to compile. Then its
            q is NaN, and `check` says why.

    Raises:
        TypeError, ValueError: an argument cannot be used, or processes have different ones.
        jax_mla.UnsupportedError: a device is no NVIDIA GPU that has a kernel, or is a part of one
            (MIG), or devices of a group are not connected or not of one host.
        jax_mla.SetupError: the driver refused, another process failed, or jax.distributed is needed
            and was not initialised.
        jax_mla.PeerTimeout: another process did not come.

    Example::

        with jax_mla.DcpMailbox(mesh, "dcp", max_batch=64, heads=16) as mailbox:
            ...
    """

    def __init__(
        self,
        mesh: Mesh,
        axis: str,
        *,
        max_batch: int,
        heads: int,
        q_dtype: Any = "float8_e4m3fn",
        timeout: float = 120.0,
    ) -> None:
        self._capacity = Capacity(
            mesh=mesh,
            axis=axis,
            max_batch=max_batch,
            heads=heads,
            q_dtype=q_dtype,
            timeout=timeout,
        )
        self._groups = Groups(mesh, axis)
        self._process = jax.process_index()
        check_devices(self._groups, self._process)
        self._made = make(self._capacity, self._groups, self._process)
        self._closed = False
        self._meetings = 0

    @property
    def mesh(self) -> Mesh:
        """The mesh that it was made for."""
        return self._capacity.mesh

    @property
    def axis(self) -> str:
        """Name of the mesh axis over which it gathers."""
        return self._capacity.axis

    @property
    def ranks(self) -> int:
        """Size of that axis."""
        return self._capacity.ranks

    @property
    def max_batch(self) -> int:
        """Most tokens that a device has in a call."""
        return self._capacity.max_batch

    @property
    def heads(self) -> int:
        """Heads of one device."""
        return self._capacity.heads

    @property
    def q_dtype(self) -> str:
        """Name of the dtype of the widest queries that it gathers."""
        return self._capacity.q_dtype

    @property
    def timeout(self) -> float:
        """Seconds that a call waits for its peers."""
        return self._capacity.timeout

    @property
    def number(self) -> int:
        """By which compiled programs name it, the same in all processes."""
        return self._made.number

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def require(
        self, mesh: Mesh | AbstractMesh, axis: str | None, batch: int, heads: int, q_dtype: str
    ) -> None:
        """Checks that it serves a call.

        Args:
            mesh: of the call; while tracing an abstract one, whose devices are not known.
            axis: over which the call gathers.
            batch, heads: of one device in the call.
            q_dtype: name of the dtype of its queries.

        Raises:
            ValueError: it does not.
        """
        self._check_open()
        self._capacity.require(mesh, axis, batch, heads, q_dtype)

    def check(self) -> None:
        """Checks that no call of a device of this process gave up waiting for a peer.

        It sees what complete calls have reported and waits for none.

        Raises:
            jax_mla.PeerTimeout: one did.
        """
        for rank in self._made.ranks:
            if (missing := rank.missing) is not None:
                raise PeerTimeout(
                    f"{rank.device} waited {self.timeout:g} s in vain for the queries of rank"
                    f" {rank.group.index(missing)} of axis {self.axis!r}, {missing} of process"
                    f" {missing.process_index}; its results since then are NaN. Find out why that"
                    " rank did not make the same call, then reset() the mailbox in all processes."
                )

    def reset(self) -> None:
        """Makes it usable again after a PeerTimeout; collective.

        Wait for the results of all calls first (`jax.block_until_ready`), in all processes.

        Raises:
            ValueError: it is closed, or another process closes it.
            jax_mla.SetupError: the driver refused, or another process failed.
            jax_mla.PeerTimeout: another process did not come. Calls are refused until a reset
                succeeds.
        """
        self._check_open()
        ranks = self._made.ranks
        self._made.unregister()
        with self._meeting() as meeting:
            for rank in ranks:
                rank.drain()
            agree(meeting, {"operation": "reset"})  # no rank publishes any more
            for rank in ranks:
                rank.clear()
            meeting.exchange("empty")
            for rank in ranks:
                rank.set_report(mailbox_layout.OPEN)
        self._made.register()

    def close(self) -> None:
        """Frees the memory; collective. Does nothing when closed.

        Wait for the results of all calls first (`jax.block_until_ready`), in all processes. Later
        calls are refused, and CUDA graphs captured before give NaN.

        Raises:
            ValueError: another process resets it.
            jax_mla.SetupError: the driver refused, or another process failed.
            jax_mla.PeerTimeout: another process did not come. The memory is freed all the same.
        """
        if self._closed:
            return
        self._closed = True
        self._made.unregister()
        for rank in self._made.ranks:
            if rank.missing is None:  # else `check` still tells
                rank.set_report(mailbox_layout.CLOSED)
        with self._made.undo, self._meeting() as meeting:
            for rank in self._made.ranks:
                rank.drain()
                rank.shut()
            agree(meeting, {"operation": "close"})

    def __enter__(self) -> "DcpMailbox":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"DcpMailbox(axis={self.axis!r}, ranks={self.ranks}, max_batch={self.max_batch},"
            f" heads={self.heads}, q_dtype={self.q_dtype!r}, timeout={self.timeout:g},"
            f" number={self.number}, closed={self.closed})"
        )

    def _meeting(self) -> Meeting:
        self._meetings += 1
        key = f"{self._made.key}/{self._meetings}"
        patience = PATIENCE + self.timeout
        return Meeting(key, self._process, self._groups.processes, patience)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"mailbox must be open, got {self!r}. Make a new one.")
