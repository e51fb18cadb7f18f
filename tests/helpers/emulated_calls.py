"""Runs kernels on the CPU: their PTX, which the build leaves beside the cubins."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ptx_machine import GlobalMemory, run

from jax_mla.rules import ROW
from jax_mla.testing import Bytes

POISON = 0xFF
"""No kernel writes this byte (NaN is 0x7F): a query byte that still holds it was not written."""

BUFFERS = (
    "qkv",
    "q_norm",
    "kv_norm",
    "w_qb",
    "w_uk",
    "cache",
    "slots",
    "q_scale",
    "k_scale",
    "q",
)
"""The parameters of a kernel that are addresses, in order; numbers follow (ffi/src/launch.cc)."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """What the build knows about a kernel.

    Attributes:
        text: its PTX.
        cluster: CTAs of a cluster.
        tokens: that a cluster handles.
        shared_memory: bytes of a CTA.
    """

    text: str
    cluster: int
    tokens: int
    shared_memory: int


def built_kernel(folder: Path, key: str, arch: str) -> Kernel:
    """A kernel from the folder that jax_mla/aot.py has written."""
    manifest = json.loads((folder / "manifest.json").read_text())
    [entry] = [e for e in manifest["kernels"] if (e["key"], e["arch"]) == (key, arch)]
    return Kernel(
        text=(folder / entry["file"]).with_suffix(".ptx").read_text(),
        cluster=entry["cluster"],
        tokens=entry["tokens"],
        shared_memory=entry["shared_memory"],
    )


def emulated_bytes(
    kernel: Kernel,
    inputs: Mapping[str, Any],
    *,
    q_scale: float = 1.0,
    k_scale: float = 1.0,
    eps: float = 1e-6,
) -> tuple[Bytes, Bytes]:
    """The bytes of q, which is POISON before, and of the cache after a call.

    Args:
        kernel: to run.
        inputs: arrays by name, as `jax_mla.testing.make_inputs` gives them; they stay as they are.
        q_scale, k_scale, eps: as for `jax_mla.q_absorb`.

    Raises:
        PtxError: the kernel does what it may not do.
    """
    batch, columns = inputs["qkv"].shape
    heads, (pages, page_size, _) = len(inputs["w_uk"]), inputs["cache"].shape
    memory = GlobalMemory(
        {
            **{name: np.asarray(array) for name, array in inputs.items()},
            "q_scale": np.array(q_scale, np.float32),
            "k_scale": np.array(k_scale, np.float32),
            "q": np.full((batch, heads, ROW), POISON, np.uint8),
        }
    )
    run(
        kernel.text,
        grid=(kernel.cluster, heads, -(-batch // kernel.tokens)),
        cluster=kernel.cluster,
        shared_bytes=kernel.shared_memory,
        parameters=[*BUFFERS, columns, pages * page_size, batch, eps],
        memory=memory,
    )
    q = memory.bytes("q").reshape(batch, heads, ROW)
    return q, memory.bytes("cache").reshape(pages, page_size, ROW)
