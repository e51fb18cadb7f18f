"""What a mailbox is made for, and which calls that serves."""

import dataclasses
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from jax_mla import mailbox_layout, rules, scalars
from jax_mla.errors import WITHOUT_MAILBOX
from jax_mla.formats import E4M3, Form

_MAX_SECONDS = 1e9
"""Nanoseconds of that many, and of the clock they are added to, fit into 64 bits."""
_ALIGNMENT = 256


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Capacity:
    """What a mailbox is made for; the attributes are the arguments of `jax_mla.DcpMailbox`.

    Raises:
        TypeError, ValueError: an argument cannot be used.
    """

    mesh: Mesh
    axis: str
    max_batch: int
    heads: int
    q_dtype: str
    timeout: float

    def __post_init__(self) -> None:
        _check_mesh(self.mesh, self.axis)
        _check_count("max_batch", self.max_batch, rules.MAX_BATCH, "tokens")
        _check_count("heads", self.heads, rules.MAX_HEADS, "heads")
        _check_timeout(self.timeout)
        name = scalars.dtype_name("q_dtype", self.q_dtype)
        if name not in E4M3.q_dtypes:
            raise ValueError(
                f"q_dtype must be {' or '.join(E4M3.q_dtypes)}, got {name}."
                " Pass that of the widest queries to gather."
            )
        object.__setattr__(self, "q_dtype", name)
        object.__setattr__(self, "timeout", float(self.timeout))

    @property
    def ranks(self) -> int:
        return int(self.mesh.shape[self.axis])

    @property
    def half_bytes(self) -> int:
        """Size of what one call can gather, and of each of the two halves of a mailbox."""
        needed = self.max_batch * self.ranks * self.heads * _query_bytes(self.q_dtype)
        return -(-needed // _ALIGNMENT) * _ALIGNMENT

    def require(
        self, mesh: Mesh | AbstractMesh, axis: str | None, batch: int, heads: int, q_dtype: str
    ) -> None:
        """Raises ValueError where a call needs another mailbox."""
        if axis != self.axis:
            raise ValueError(
                f"mailbox must be of the dcp axis of the call, {axis!r}, got one of axis"
                f" {self.axis!r}. Make one for that axis."
            )
        if not _same_mesh(mesh, self.mesh):
            raise ValueError(
                f"mailbox must be of the mesh of the call, {described(mesh)}, got one of"
                f" {described(self.mesh)}. Make one for that mesh."
            )
        if batch > self.max_batch:
            raise ValueError(
                f"mailbox must have room for the {batch} tokens that a device has in the call, got"
                f" max_batch = {self.max_batch}. Make a larger one, or split the batch."
            )
        if heads != self.heads:
            raise ValueError(
                f"mailbox must be of the {heads} heads that a device has in the call, got one of"
                f" {self.heads} heads. Make one with heads={heads}."
            )
        if _query_bytes(q_dtype) > _query_bytes(self.q_dtype):
            raise ValueError(
                f"mailbox must carry {q_dtype} queries, got one of {self.q_dtype}."
                f' Make one with q_dtype="{q_dtype}", which carries both.'
            )


def described(mesh: Mesh | AbstractMesh) -> str:
    """Returns names and sizes of the axes of a mesh and, where known, ids of its devices."""
    sizes = " x ".join(f"{size} {name!r}" for name, size in mesh.shape.items())
    if isinstance(mesh, AbstractMesh):
        return f"a mesh of {sizes}"
    return f"a mesh of {sizes} with devices {[device.id for device in mesh.devices.flat]}"


def _query_bytes(q_dtype: str) -> int:
    return Form(q_dtype=q_dtype).q_bytes


def _same_mesh(mesh: Mesh | AbstractMesh, own: Mesh) -> bool:
    """Whether a mesh is, or while tracing may be, `own`: axis types do not matter."""
    if tuple(mesh.shape.items()) != tuple(own.shape.items()):
        return False
    return isinstance(mesh, AbstractMesh) or list(mesh.devices.flat) == list(own.devices.flat)


def _check_mesh(mesh: Any, axis: Any) -> None:
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}."
            " A mailbox lies on devices: make the mesh with jax.make_mesh."
        )
    if axis not in mesh.axis_names:
        raise ValueError(
            f"axis must be one of the mesh axes {', '.join(map(repr, mesh.axis_names))}, got"
            f" {axis!r}. Name the one over which heads are gathered."
        )
    ranks = mesh.shape[axis]
    if ranks > mailbox_layout.MAX_RANKS:
        raise ValueError(
            f"axis must have at most {mailbox_layout.MAX_RANKS} devices, got {axis!r} of {ranks}."
            f" Use a shorter axis, or {WITHOUT_MAILBOX}"
        )


def _check_count(name: str, count: Any, most: int, unit: str) -> None:
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(
            f"{name} must be a Python int, got {type(count).__name__}."
            f" Pass the number of {unit} that a device has in a call."
        )
    if not 1 <= count <= most:
        raise ValueError(
            f"{name} must be 1 to {most}, got {count}."
            f" Pass the number of {unit} that a device has in a call."
        )


def _check_timeout(timeout: Any) -> None:
    if not isinstance(timeout, int | float) or isinstance(timeout, bool):
        raise TypeError(
            f"timeout must be a Python float, got {type(timeout).__name__}. Pass seconds."
        )
    if not 0 < timeout <= _MAX_SECONDS:
        raise ValueError(
            f"timeout must be positive and at most {_MAX_SECONDS:g} s, got {timeout}."
            " Pass the seconds that a call may wait for its peers."
        )
