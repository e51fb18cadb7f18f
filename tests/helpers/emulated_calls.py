"""Runs kernels on the CPU: their PTX, which the build leaves beside the cubins."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from ptx_machine import GlobalMemory, run

from jax_mla.formats import CACHE_FORMATS, STYLES
from jax_mla.rules import Q_RANK, ROW, form_of

POISON = 0xFF
"""No kernel writes this byte as e4m3, nor two of them as BF16 (NaN is 0x7F and 0x7FFF): what still
holds it was not written."""

BUFFERS = ("qkv", "q_norm", "kv_norm", "w_qb", "w_uk", "cache", "slots", "q_scale", "k_scale", "q")
"""The parameters of a kernel that are addresses, in order; numbers follow (ffi/src/launch.h)."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """What the build knows about a kernel.

    Attributes:
        text: its PTX.
        cluster: CTAs of a cluster.
        tokens: that a cluster handles.
        shared_memory: bytes of a CTA.
        form: of its variant.
    """

    text: str
    cluster: int
    tokens: int
    shared_memory: int
    form: str


def built_kernel(folder: Path, key: str, arch: str) -> Kernel:
    """A kernel from the folder that jax_mla/aot.py has written."""
    manifest = json.loads((folder / "manifest.json").read_text())
    [entry] = [e for e in manifest["kernels"] if (e["key"], e["arch"]) == (key, arch)]
    return Kernel(
        text=(folder / entry["file"]).with_suffix(".ptx").read_text(),
        cluster=entry["cluster"],
        tokens=entry["tokens"],
        shared_memory=entry["shared_memory"],
        form=entry["form"],
    )


def emulated_results(
    kernel: Kernel,
    inputs: Mapping[str, Any],
    *,
    q_scale: float = 1.0,
    k_scale: float = 1.0,
    eps: float = 1e-6,
    q_dtype: str | None = None,
    return_q_norm: bool = False,
) -> list[Any]:
    """The results of a call, as NumPy arrays; all but the cache are POISON before.

    Args:
        kernel: to run.
        inputs: arguments by name, as `jax_mla.testing.make_inputs` gives them; they stay as they
            are.
        q_scale, k_scale, eps, q_dtype, return_q_norm: as for `jax_mla.q_absorb`.

    Raises:
        PtxError: the kernel does what it may not do.
    """
    rope = inputs.get("rope")
    form = form_of(inputs, style=rope.style if rope else None, q_dtype=q_dtype)
    batch, columns = inputs["qkv"].shape
    heads, (pages, page_size, _) = len(inputs["w_uk"]), inputs["cache"].shape
    results = {"q": poisoned((batch, heads, ROW), form.q_dtype)}
    if return_q_norm:
        results["q_latent"] = poisoned((batch, Q_RANK), "bfloat16")
    scales = {"q_scale": np.array(q_scale, np.float32), "k_scale": np.array(k_scale, np.float32)}
    table = {"cos_sin": rope.cos_sin, "positions": rope.positions} if rope else {}
    arrays = {name: array for name, array in inputs.items() if name != "rope"}
    buffers = {**arrays, **scales, **table, **results}
    memory = GlobalMemory({name: np.asarray(array) for name, array in buffers.items()})
    options: list[str | int] = [
        *(("cos_sin", "positions") if rope else (0, 0)),
        "q_latent" if return_q_norm else 0,
        len(rope.cos_sin) if rope else 0,
        (None, *STYLES).index(form.style),
        CACHE_FORMATS.index(form.cache),
    ]
    run(
        kernel.text,
        grid=(kernel.cluster, heads, -(-batch // kernel.tokens)),
        cluster=kernel.cluster,
        shared_bytes=kernel.shared_memory,
        parameters=[
            *BUFFERS, columns, pages * page_size, batch, eps,
            *(options if kernel.form != "plain" else []),
        ],
        memory=memory,
    )  # fmt: skip

    def result(name: str, like: Any) -> Any:
        return memory.bytes(name).view(like.dtype).reshape(like.shape)

    latent = [result("q_latent", results["q_latent"])] if return_q_norm else []
    return [result("q", results["q"]), result("cache", inputs["cache"]), *latent]


def poisoned(shape: tuple[int, ...], dtype: str) -> Any:
    """An array full of POISON."""
    kind = jnp.dtype(dtype)
    poison = np.full((*shape, kind.itemsize), POISON, np.uint8)
    return poison.view(kind).reshape(shape)
