"""From a variant to a cubin: the host function that the DSL compiles a kernel through."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cuda.bindings.driver as cuda
from cutlass import BFloat16, Constexpr, Float32, Int32, Int64, Uint8, Uint32, cute
from cutlass.base_dsl.compiler import DumpDir, GPUArch, KeepCUBIN, KeepPTX
from cutlass.cute.runtime import make_ptr

from jax_mla.kernels.exchange import ExchangeQueries
from jax_mla.kernels.options import Options
from jax_mla.kernels.resident import ResidentQuery
from jax_mla.kernels.small import SmallQuery
from jax_mla.kernels.tiled import TiledQuery
from jax_mla.variants import THREADS, Variant

KERNELS = {
    "small": SmallQuery,
    "tiled": TiledQuery,
    "resident": ResidentQuery,
    "exchange": ExchangeQueries,
}


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A cubin and what its launch needs: the symbol and the bytes of dynamic shared memory."""

    cubin: bytes
    ptx: str
    symbol: str
    shared_memory: int


@cute.jit
def launch(
    query: Constexpr,
    qkv: cute.Pointer,
    q_norm: cute.Pointer,
    kv_norm: cute.Pointer,
    w_qb: cute.Pointer,
    w_uk: cute.Pointer,
    cache: cute.Pointer,
    slots: cute.Pointer,
    q_scale: cute.Pointer,
    k_scale: cute.Pointer,
    q: cute.Pointer,
    stride: Int64,
    cache_rows: Int64,
    batch: Int32,
    eps: Float32,
    options: Options | None,
    stream: cuda.CUstream,
):
    """Launches one kernel; only its device code is kept, the grid here is a placeholder."""
    query.kernel(
        qkv, q_norm, kv_norm, w_qb, w_uk, cache, slots, q_scale, k_scale, q,
        stride, cache_rows, batch, eps, options,
    ).launch(
        grid=[query.cluster, 1, 1],
        block=[THREADS, 1, 1],
        cluster=[query.cluster, 1, 1],
        smem=query.shared.bytes,
        min_blocks_per_mp=query.blocks_per_sm,
        preferred_smem_carveout=100,
        stream=stream,
    )  # fmt: skip


@cute.jit
def launch_exchange(
    exchange: Constexpr,
    q: Int64,
    out: Int64,
    control: Int64,
    batch: Int32,
    words: Int32,
    replacement: Uint32,
    stream: cuda.CUstream,
):
    """The same for the kernel that gathers queries."""
    exchange.kernel(q, out, control, batch, words, replacement).launch(
        grid=[1, 1, 1],
        block=[THREADS, 1, 1],
        min_blocks_per_mp=exchange.blocks_per_sm,
        stream=stream,
    )


def _q_absorb_arguments(variant: Variant) -> list[Any]:
    def pointer(dtype):
        # Never followed: any non-null, aligned address will do.
        return make_ptr(dtype, 16, cute.AddressSpace.gmem, assumed_align=16)

    options = None
    if variant.form != "plain":
        options = Options(
            pointer(Float32), pointer(Int32), pointer(BFloat16), Int32(1), Int32(1), Int32(1)
        )
    return [
        *[pointer(BFloat16)] * 5,
        pointer(Uint8),
        pointer(Int32),
        *[pointer(Float32)] * 2,
        pointer(BFloat16 if variant.form == "bf16" else Uint8),
        Int64(1),
        Int64(1),
        Int32(1),
        Float32(1),
        options,
    ]


def compile_kernel(variant: Variant, arch: str) -> Compiled:
    """Compiles `variant` for `arch`; no GPU is needed."""
    kernel = KERNELS[variant.kernel](variant)
    type(kernel).kernel.set_name_prefix(
        variant.key, remove_cutlass_symbol=True, keep_mangled_name=False
    )
    if variant.kernel == "exchange":
        host, arguments = launch_exchange, [*[Int64(16)] * 3, *[Int32(1)] * 2, Uint32(1)]
    else:
        host, arguments = launch, _q_absorb_arguments(variant)
    with tempfile.TemporaryDirectory() as folder:
        compiled = cute.compile[(GPUArch(arch), KeepCUBIN, KeepPTX, DumpDir(folder))](
            host, kernel, *arguments, cuda.CUstream(0)
        )
        cubin, ptx = compiled.__cubin__, compiled.__ptx__
    if not cubin:
        raise RuntimeError(f"{variant.key} {arch}: the compiler left no cubin in {Path(folder)}")
    if ".local" in ptx:
        raise RuntimeError(f"{variant.key} {arch}: a run-time index put an array in local memory")
    return Compiled(
        cubin=cubin,
        ptx=ptx,
        symbol=next(iter(compiled.kernel_info)),
        shared_memory=kernel.shared.bytes,
    )
