"""One function an instruction; the first docstring line is the PTX.

Every wrapper goes through `inline_ptx`, which LLVM neither reorders against other memory operations
nor deletes, so loads and stores happen in program order. Pointers are CuTe pointers: global ones
become 64-bit addresses, shared ones 32-bit addresses of this CTA's window.
"""

from __future__ import annotations

from cutlass import Float32, Int32, Int64, Uint16, Uint32
from cutlass.cute.arch import inline_ptx

# L2 policy words, as `createpolicy.fractional.L2::evict_first` of fraction 1.0 builds them.
EVICT_FIRST = 0x12F0000000000000


def load_global_16(pointer):
    """ld.global.v4.b32: 16 bytes that an earlier kernel wrote."""
    return inline_ptx(
        "ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[pointer],
    )


def load_constant_16(pointer):
    """ld.global.nc.v4.b32: 16 bytes that nothing writes while this kernel runs."""
    return inline_ptx(
        "ld.global.nc.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[pointer],
    )


def load_global_i32(pointer):
    """ld.global.b32: one int32."""
    return inline_ptx(
        "ld.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[pointer]
    )


def load_global_b16(pointer):
    """ld.global.b16: one 16-bit word."""
    return inline_ptx(
        "ld.global.b16 {$w0}, [{$r0}];", write_only_types=[Uint16], read_only_args=[pointer]
    )


def load_global_b32_if(condition, pointer, dtype):
    """@p ld.global.b32: one `dtype`; where `condition` is 0, 0 and no access.

    Predicated, not branched around: the compiler waits for the word where it is used.
    """
    return inline_ptx(
        "{ .reg .pred p;"
        " setp.ne.b32 p, {$r0}, 0;"
        " mov.b32 {$w0}, 0;"
        " @p ld.global.b32 {$w0}, [{$r1}]; }",
        write_only_types=[dtype],
        read_only_args=[condition, pointer],
    )


def load_global(pointer, dtype):
    """ld.global: one value of 32 or 64 bits."""
    return inline_ptx(
        f"ld.global.b{dtype.width} {{$w0}}, [{{$r0}}];",
        write_only_types=[dtype],
        read_only_args=[pointer],
    )


def load_global_16_if(condition, pointer):
    """@p ld.global.v4.b32: 16 bytes; where `condition` is false, zeros and no access."""
    return _load_16_if("ld.global", condition, pointer)


def load_system_16_if(condition, pointer):
    """@p ld.relaxed.sys.global.v4.b32: 16 bytes; where `condition` is false, zeros, no access."""
    return _load_16_if("ld.relaxed.sys.global", condition, pointer)


def _load_16_if(load, condition, pointer):
    zeros = " ".join(f"mov.b32 {{$w{i}}}, 0;" for i in range(4))
    return inline_ptx(
        f"{{ .reg .pred p; setp.ne.b32 p, {{$r0}}, 0; {zeros}"
        f" @p {load}.v4.b32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r1}}]; }}",
        write_only_types=[Uint32] * 4,
        read_only_args=[Int32(condition), pointer],
    )


def load_system_16(pointer):
    """ld.relaxed.sys.global.v4.b32: 16 bytes that another device may be writing, word by word."""
    return inline_ptx(
        "ld.relaxed.sys.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[pointer],
    )


def store_system_16(pointer, words):
    """st.relaxed.sys.global.v4.b32: 16 bytes for another device, each word at once."""
    inline_ptx(
        "st.relaxed.sys.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[pointer, *words],
    )


def store_system_b32(pointer, word):
    """st.relaxed.sys.global.b32: a word for another device or the host."""
    inline_ptx("st.relaxed.sys.global.b32 [{$r0}], {$r1};", read_only_args=[pointer, word])


def count_up(pointer, last):
    """atom.relaxed.gpu.global.inc.u32: adds 1, or starts at 0 again after `last`; what was there.

    Several threads of the device may do so at once.
    """
    return inline_ptx(
        "atom.relaxed.gpu.global.inc.u32 {$w0}, [{$r0}], {$r1};",
        write_only_types=[Uint32],
        read_only_args=[pointer, last],
    )


def load_global_f32(pointer):
    """ld.global.b32: one float32."""
    return inline_ptx(
        "ld.global.b32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[pointer]
    )


def load_shared_16(pointer):
    """ld.shared.v4.b32: 16 bytes as words."""
    return inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[pointer],
    )


def load_shared_f32x2(pointer):
    """ld.shared.v2.b32: two float32."""
    return inline_ptx(
        "ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Float32] * 2,
        read_only_args=[pointer],
    )


def load_shared_f32x4(pointer):
    """ld.shared.v4.b32: four float32."""
    return inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Float32] * 4,
        read_only_args=[pointer],
    )


def load_shared_b32(pointer):
    """ld.shared.b32: one word."""
    return inline_ptx(
        "ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[pointer]
    )


def store_shared_b32(pointer, word):
    """st.shared.b32."""
    inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[pointer, word])


def store_shared_16(pointer, words):
    """st.shared.v4.b32: 16 bytes."""
    inline_ptx(
        "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[pointer, *words]
    )


def store_shared_f32x2(pointer, x, y):
    """st.shared.v2.b32: two float32."""
    inline_ptx("st.shared.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[pointer, x, y])


def store_global_b8(pointer, bits):
    """st.global.b8: the lowest byte of a 16-bit word."""
    inline_ptx("st.global.b8 [{$r0}], {$r1};", read_only_args=[pointer, bits])


def store_global_b16(pointer, bits):
    """st.global.b16."""
    inline_ptx("st.global.b16 [{$r0}], {$r1};", read_only_args=[pointer, bits])


def store_global(pointer, words):
    """st.global.b32, st.global.v2.b32 or st.global.v4.b32: one, two or four words."""
    vector = {1: "", 2: ".v2", 4: ".v4"}[len(words)]
    values = ", ".join(f"{{$r{i}}}" for i in range(1, len(words) + 1))
    values = f"{{{values}}}" if vector else values
    inline_ptx(f"st.global{vector}.b32 [{{$r0}}], {values};", read_only_args=[pointer, *words])


def prefetch_l2(pointer):
    """prefetch.global.L2: the line of `pointer`, soon to be loaded."""
    inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[pointer])


def copy_async_16(destination, source):
    """cp.async.cg.shared.global.L2::cache_hint, 16 bytes, evict-first.

    Completion: the issuing thread's `cp_async_wait_group`, then a barrier for other readers.
    Compilers before CUDA 13.4 miscompile this form; `jax_mla.sass` checks every cubin for it.
    """
    inline_ptx(
        "cp.async.cg.shared.global.L2::cache_hint [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[destination, source, Int64(EVICT_FIRST)],
    )


def copy_bulk(destination, source, size, barrier):
    """cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes, evict-first.

    One thread copies `size` bytes (a multiple of 16) and `barrier`, of this CTA, counts them.
    The wait on `barrier` makes the bytes visible to the waiting thread.
    """
    inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [{$r0}], [{$r1}], {$r2}, [{$r3}], {$r4};",
        read_only_args=[destination, source, Int32(size), barrier, Int64(EVICT_FIRST)],
    )


def store_to_peer_16(destination, words, barrier, rank):
    """st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32: 16 bytes.

    To the same-named place of CTA `rank` of the cluster, whose `barrier` counts the bytes: the
    caller knows that the peer has initialised it and no longer uses the destination. The wait on
    `barrier` makes the bytes visible to the waiting thread.
    """
    inline_ptx(
        "{ .reg .b32 dst, bar;"
        " mapa.shared::cluster.u32 dst, {$r0}, {$r2};"
        " mapa.shared::cluster.u32 bar, {$r1}, {$r2};"
        " st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32"
        " [dst], {{$r3}, {$r4}, {$r5}, {$r6}}, [bar]; }",
        read_only_args=[destination, barrier, rank, *words],
    )


def load_matrices(pointer):
    """ldmatrix.sync.aligned.m8n8.x4.shared.b16: four 8x8 matrices; lane i names row i % 8.

    Lane i's address is that of matrix i // 8.
    """
    return inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[pointer],
    )


def load_matrices_transposed(pointer):
    """ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16: the same, each matrix transposed."""
    return inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[pointer],
    )


def mma(acc, a, b):
    """mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32: acc + a @ b, accumulated in FP32."""
    return inline_ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
        " {{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}},"
        " {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *acc],
    )


def rsqrt(x):
    """rsqrt.approx.ftz.f32: relative error below 2^-22.9."""
    return inline_ptx(
        "rsqrt.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x]
    )


def reciprocal(x):
    """rcp.rn.f32: 1 / x, correctly rounded, as IEEE division."""
    return inline_ptx("rcp.rn.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def pack_bf16(low, high):
    """cvt.rn.bf16x2.f32: two float32, rounded to nearest even, in one word."""
    return inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};",
        write_only_types=[Uint32],
        read_only_args=[low, high],
    )


def pack_e4m3(low, high):
    """cvt.rn.satfinite.e4m3x2.f32: two bytes; NaN of either sign becomes 0x7F, never 0xFF."""
    return inline_ptx(
        "cvt.rn.satfinite.e4m3x2.f32 {$w0}, {$r1}, {$r0};",
        write_only_types=[Uint16],
        read_only_args=[low, high],
    )


def pair_halves(first, second, half):
    """prmt.b32: the low (0) or high (1) halves of two words, `first`'s in the lower half."""
    return inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Uint32],
        read_only_args=[first, second, Uint32(0x7632 if half else 0x5410)],
    )


def unpack_bf16(word):
    """The two float32 of a word of bf16, low half first."""
    return (word << 16).bitcast(Float32), (word & Uint32(0xFFFF0000)).bitcast(Float32)
