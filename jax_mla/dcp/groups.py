"""Which devices of a mesh gather queries from each other, as which ranks, in which processes."""

import dataclasses
import functools

import numpy as np
from jax import Device
from jax.sharding import Mesh


@dataclasses.dataclass(frozen=True)
class Groups:
    """The groups of a mesh along one of its axes.

    A device's rank is its place along the axis, which neither its id nor its ordinal tells: meshes
    are often permuted.

    Attributes:
        mesh: the mesh.
        axis: name of the axis.
    """

    mesh: Mesh
    axis: str

    @functools.cached_property
    def members(self) -> tuple[tuple[Device, ...], ...]:
        """The devices of each group in order of ranks: those that differ along the axis only."""
        along = self.mesh.axis_names.index(self.axis)
        ranks = self.mesh.devices.shape[along]
        rows = np.moveaxis(self.mesh.devices, along, -1).reshape(-1, ranks)
        return tuple(tuple(row) for row in rows)

    def of(self, device: Device) -> tuple[Device, ...]:
        """Returns a device's group."""
        return next(group for group in self.members if device in group)

    def owned(self, process: int) -> tuple[Device, ...]:
        """Returns the devices of a process."""
        devices = (device for group in self.members for device in group)
        return tuple(device for device in devices if device.process_index == process)

    @property
    def processes(self) -> tuple[int, ...]:
        """The processes with devices of the mesh."""
        return tuple(sorted({device.process_index for device in self.mesh.devices.flat}))

    def partners(self, process: int) -> tuple[int, ...]:
        """Returns the other processes with devices in groups of a process."""
        return tuple(p for p in self.processes if p != process and self.reached(p, process))

    def reached(self, owner: int, reader: int) -> tuple[Device, ...]:
        """Returns the devices of one process whose groups hold devices of another.

        Both processes find the same order.
        """
        groups = (g for g in self.members if any(d.process_index == reader for d in g))
        return tuple(device for g in groups for device in g if device.process_index == owner)
