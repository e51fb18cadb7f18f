"""One of two processes with two fake GPUs each: what they see when they share mailboxes, as JSON.

python mailbox_process.py PROCESS PORT
"""

import collections
import contextlib
import json
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from fake_gpu import FILE_NAME, FakeDriver
from fake_kernel import kernels
from fake_setup import FakeDevice, install
from jax._src.distributed import global_state

import jax_mla
from jax_mla.dcp import making


def mesh_of(ids: list[list[int]]) -> jax.sharding.Mesh:
    """A mesh of devices by their ids: 0 and 1 are of process 0, 2 and 3 of process 1."""
    devices = [FakeDevice(id, id // 2, id % 2) for group in ids for id in group]
    return jax.sharding.Mesh(np.array(devices).reshape(np.shape(ids)), ("data", "dcp"))


class Process:
    """What both processes do in the same order."""

    def __init__(self, process: int, patch: pytest.MonkeyPatch) -> None:
        self.process, self.patch = process, patch
        self.driver = FakeDriver(2)
        self.registered = install(patch, self.driver)

    def make(self, **options: Any) -> jax_mla.DcpMailbox:
        options = {"max_batch": 1, "heads": 1, "timeout": 1.0} | options
        return jax_mla.DcpMailbox(mesh_of([[3, 0], [1, 2]]), "dcp", **options)

    def error_of(self, what: Callable[[], Any]) -> str:
        try:
            what()
        except (ValueError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    def meet(self, name: str) -> None:
        client: Any = global_state.client
        client.wait_at_barrier(name, 60_000)

    def held(self) -> collections.Counter[str]:
        """What the driver has given and, as "files", what keeps its memory alive."""
        files = 0
        for file in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # listdir's own
                files += FILE_NAME in os.readlink(f"/proc/self/fd/{file}")
        return self.driver.live + collections.Counter(files=files)

    def published(self, mailbox: jax_mla.DcpMailbox, name: str) -> dict[int, Any]:
        """Lets all devices publish their ids; returns what came to each device of this process."""
        own = kernels(self.driver, self.registered, mailbox.number)
        assert all(kernel.is_empty() for kernel in own.values())
        self.meet(f"{name} seen empty")
        for ordinal, kernel in own.items():
            kernel.publish(2 * self.process + ordinal)
        self.meet(f"{name} published")
        return {2 * self.process + ordinal: kernel.came() for ordinal, kernel in own.items()}

    def run(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.process == 1:  # has one of its own, open, which the other knows nothing of
            own = jax_mla.DcpMailbox(mesh_of([[3, 2]]), "dcp", max_batch=1, heads=1)
            found["own number"] = own.number
        idle = self.held()
        mailbox = self.make()
        found["number"] = mailbox.number
        found["came"] = self.published(mailbox, "made")
        mailbox.reset()
        found["came after a reset"] = self.published(mailbox, "reset")
        mailbox.close()
        found["left"] = self.held() - idle
        found.update(self.failures())
        mailbox = self.make()
        found["number after failures"] = mailbox.number
        found["came after failures"] = self.published(mailbox, "failures")
        found["mixed up"] = self.error_of(mailbox.reset if self.process else mailbox.close)
        found["late"] = self.late()
        return found

    def failures(self) -> dict[str, Any]:
        found = {"disagreement": self.error_of(lambda: self.make(max_batch=1 + self.process))}
        if self.process == 1:
            self.driver.fail_at = "cuMemCreate"
        found["failure"] = self.error_of(self.make)
        self.driver.fail_at = None
        with self.patch.context() as patch:
            if self.process == 1:
                other_host = pathlib.Path("/proc/sys/kernel/ostype")
                patch.setattr(making, "_HOST", other_host)
            found["hosts"] = self.error_of(self.make)
        return found

    def late(self) -> str:
        """Process 1 does not come."""
        found = ""
        if self.process == 0:
            self.patch.setattr(making, "PATIENCE", 0.5)
            found = self.error_of(self.make)
        self.meet("late")
        return found


def main(process: int, port: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
    with pytest.MonkeyPatch.context() as patch:
        print(json.dumps(Process(process, patch).run()))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
