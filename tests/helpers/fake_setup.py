"""Stand-ins for JAX's devices, the driver and the FFI library, where mailboxes are made."""

import dataclasses

import pytest
from fake_gpu import FakeDriver

from jax_mla import runtime
from jax_mla.runtime import device, library, peer_memory

Registered = dict[tuple[int, int], dict[str, int]]
"""The mailboxes in the FFI library, by (ordinal, number)."""


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """What jax_mla reads of a jax.Device, for meshes."""

    id: int
    process_index: int = 0
    local_hardware_id: int = 0
    platform: str = "gpu"
    device_kind: str = "Fake H200"


def install(patch: pytest.MonkeyPatch, driver: FakeDriver) -> Registered:
    """Puts a fake in place of the driver and of the FFI library.

    Returns:
        The mailboxes that are registered, by (ordinal, number).
    """
    registered: Registered = {}

    def add(ordinal: int, number: int, **mailbox: int) -> None:
        registered[ordinal, number] = mailbox

    def remove(ordinal: int, number: int) -> None:
        registered.pop((ordinal, number), None)

    def load(key: str, ordinal: int) -> None:
        assert key == "exchange"

    for module in (device, peer_memory):
        patch.setattr(module, "bindings", lambda: driver)
    patch.setattr(library, "add_mailbox", add)
    patch.setattr(library, "remove_mailbox", remove)
    patch.setattr(runtime, "load", load)
    return registered
