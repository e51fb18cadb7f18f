"""The machine that runs PTX on the CPU: what instructions give, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from ptx_machine import GlobalMemory, Launch, PtxError, run, run_streams

THREADS = 64
"""Two warps."""


def execute(
    body: str,
    buffers: dict[str, npt.NDArray[Any]] | None = None,
    *,
    cluster: int = 1,
    grid: Sequence[int] | None = None,
) -> dict[str, npt.NDArray[Any]]:
    """Runs instructions and returns what the buffers then hold.

    %rd0, %rd1, .. are the addresses of the buffers, %r0 is the thread and %r1 the CTA.
    """
    buffers = buffers or {}
    memory = GlobalMemory(buffers)
    parameters = ", ".join(f".param .u64 p{i}" for i in range(len(buffers)))
    loads = "\n".join(f"ld.param.b64 %rd{i}, [p{i}];" for i in range(len(buffers)))
    text = f"""
    .version 9.4
    .target sm_90a
    .address_size 64
    .extern .shared .align 128 .b8 smem[];
    .visible .entry kernel({parameters})
    {{
        .reg .pred %p<8>; .reg .b16 %rs<8>; .reg .b32 %r<64>; .reg .b64 %rd<16>;
        {loads}
        mov.u32 %r0, %tid.x;
        mov.u32 %r1, %ctaid.x;
        {body}
        ret;
    }}
    """
    run(
        text,
        grid=grid or (cluster, 1, 1),
        cluster=cluster,
        shared_bytes=1024,
        parameters=list(buffers),
        memory=memory,
        block=THREADS,
    )
    return {name: memory.bytes(name).view(array.dtype) for name, array in buffers.items()}


def mapped(instructions: str, *values: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """What instructions leave in %r10 of each thread, given %r2, %r3, .. of it: 32 bits each."""
    words = [np.resize(array.view(np.uint32), THREADS) for array in values]
    buffers = {f"in{i}": array for i, array in enumerate(words)}
    body = "mul.wide.u32 %rd9, %r0, 4;"
    for i in range(len(values)):
        body += f"add.s64 %rd10, %rd{i}, %rd9; ld.global.b32 %r{2 + i}, [%rd10];"
    body += instructions
    body += f"add.s64 %rd10, %rd{len(values)}, %rd9; st.global.b32 [%rd10], %r10;"
    found = execute(body, {**buffers, "out": np.zeros(THREADS, np.uint32)})["out"]
    return found.view(np.uint32)


FLOATS = np.concatenate(
    [
        np.array([0, -0.0, 448, 449, 464, 465, 1e9, -1e9, np.inf, -np.inf, np.nan, 2**-10, 3e-39]),
        np.random.default_rng(0).standard_normal(THREADS - 13),
    ]
).astype(np.float32)


def test_e4m3_saturates_and_rounds_to_even_and_nan_is_positive() -> None:
    found = mapped(
        "cvt.rn.satfinite.e4m3x2.f32 %rs0, %r3, %r2; cvt.u32.u16 %r10, %rs0;",
        FLOATS,
        -FLOATS,
    )
    finite = np.clip(FLOATS, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    nan = np.isnan(FLOATS)
    assert np.array_equal(found & 0xFF, np.where(nan, 0x7F, finite))
    assert np.array_equal(found >> 8, np.where(nan, 0x7F, finite ^ 0x80))


def test_bf16_rounds_to_even() -> None:
    found = mapped("cvt.rn.bf16x2.f32 %r10, %r2, %r3;", FLOATS, np.array([1.00390625], np.float32))
    expected = FLOATS.astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)
    expected[np.isnan(FLOATS)] = 0x7FFF
    assert np.array_equal(found, expected << 16 | 0x3F80)


INTEGERS = np.random.default_rng(1).integers(-(2**31), 2**31, THREADS).astype(np.int32)
OTHERS = np.random.default_rng(2).integers(-(2**31), 2**31, THREADS).astype(np.int32)


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("add.s32 %r10, %r2, %r3;", INTEGERS + OTHERS),
        ("mad.lo.s32 %r10, %r2, %r3, -7;", INTEGERS * OTHERS - 7),
        ("shr.s32 %r10, %r2, 5;", INTEGERS >> 5),
        ("shr.u32 %r10, %r2, 5;", INTEGERS.view(np.uint32) >> 5),
        ("shl.b32 %r10, %r2, 32;", 0 * INTEGERS),
        ("shr.s32 %r10, %r2, 99;", INTEGERS >> 31),
        ("div.s32 %r10, %r2, 1000;", np.trunc(INTEGERS / 1000).astype(np.int32)),
        ("min.s32 %r10, %r2, %r3;", np.minimum(INTEGERS, OTHERS)),
        ("min.u32 %r10, %r2, %r3;", np.minimum(INTEGERS.view(np.uint32), OTHERS.view(np.uint32))),
        ("mul.wide.s32 %rd9, %r2, %r3; shr.u64 %rd9, %rd9, 32; cvt.u32.u64 %r10, %rd9;",
         (INTEGERS.astype(np.int64) * OTHERS >> 32).astype(np.int32)),
        ("prmt.b32 %r10, %r2, %r3, 0x7632;",
         INTEGERS.view(np.uint32) >> 16 | OTHERS.view(np.uint32) & np.uint32(0xFFFF0000)),
        ("lop3.b32 %r10, %r2, %r3, 255, 0x6A;", INTEGERS & OTHERS ^ 255),
        ("setp.lt.s32 %p0, %r2, %r3; selp.b32 %r10, %r2, %r3, %p0;", np.minimum(INTEGERS, OTHERS)),
        ("mov.b64 %rd9, {%r2, %r3}; mov.b64 {_, %r10}, %rd9;", OTHERS),
        ("min.relu.s32 %r10, %r2, 1000;", np.clip(INTEGERS, 0, 1000)),
    ],
)  # fmt: skip
def test_integers(instruction: str, expected: npt.NDArray[Any]) -> None:
    if "%rd9" in instruction:  # holds the thread's offset
        instruction += "mul.wide.u32 %rd9, %r0, 4;"
    found = mapped(instruction, INTEGERS, OTHERS)
    assert np.array_equal(found, expected.view(np.uint32))


def test_threads_that_part_meet_again() -> None:
    """Each adds up to its number in a loop; the shuffle needs all of them."""
    found = mapped("""
        mov.b32 %r10, 0; mov.b32 %r3, 0;
        LOOP: setp.ge.u32 %p0, %r3, %r0; @%p0 bra OUT;
        add.s32 %r10, %r10, %r3; add.s32 %r3, %r3, 1; bra.uni LOOP;
        OUT: shfl.sync.bfly.b32 %r10, %r10, 1, 31, -1;
        """)
    partner = np.arange(THREADS) ^ 1
    assert np.array_equal(found, partner * (partner - 1) // 2)


@pytest.mark.parametrize(
    ("operands", "source"),
    [
        ("5, 31, -1", 5 + np.arange(32) * 0),
        ("2, 7199, -1", np.arange(32) & ~3 | 2),  # groups of four lanes
    ],
)
def test_shuffles_from_a_lane(operands: str, source: npt.NDArray[np.intp]) -> None:
    found = mapped(f"shfl.sync.idx.b32 %r10, %r0, {operands};")
    assert np.array_equal(found, np.concatenate([source, 32 + source]))


def test_matrix_product() -> None:
    """A lane loads its fragments as the instruction set's tables say, here by ldmatrix."""
    rng = np.random.default_rng(3)
    a = rng.standard_normal((16, 16)).astype(ml_dtypes.bfloat16)
    b = rng.standard_normal((16, 8)).astype(ml_dtypes.bfloat16)
    rows = np.concatenate([a[:8, :8], a[8:, :8], a[:8, 8:], a[8:, 8:], b[:8], b[8:]])
    body = """
        shl.b32 %r2, %r0, 4; mov.b32 %r3, smem; add.s32 %r3, %r3, %r2;
        mul.wide.u32 %rd9, %r0, 16; add.s64 %rd9, %rd0, %rd9;
        setp.gt.u32 %p0, %r0, 47;
        @!%p0 ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%rd9];
        @!%p0 st.shared.v4.b32 [%r3], {%r4, %r5, %r6, %r7};
        bar.sync 0;
        and.b32 %r4, %r0, 31; shl.b32 %r4, %r4, 4; mov.b32 %r5, smem; add.s32 %r5, %r5, %r4;
        and.b32 %r6, %r0, 15; shl.b32 %r6, %r6, 4; mov.b32 %r7, smem; add.s32 %r7, %r7, %r6;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r5];
        ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%r14, %r15}, [%r7+512];
        mov.b32 %r16, 0f3F800000;
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r20, %r21, %r22, %r23},
          {%r10, %r11, %r12, %r13}, {%r14, %r15}, {%r16, %r16, %r16, %r16};
        mul.wide.u32 %rd9, %r0, 16; add.s64 %rd9, %rd1, %rd9;
        st.global.v4.b32 [%rd9], {%r20, %r21, %r22, %r23};
        """
    out = np.zeros((THREADS, 4), np.float32)
    found = execute(body, {"rows": rows, "out": out})["out"].reshape(2, 8, 4, 2, 2)
    expected = 1 + a.astype(np.float64) @ b.astype(np.float64)
    for warp in found:  # lane 4 g + t: rows g and g + 8, columns 2 t and 2 t + 1
        product = warp.transpose(2, 0, 1, 3).reshape(16, 8)
        assert np.allclose(product, expected, rtol=1e-6, atol=1e-6)


OFFSET = "mul.wide.u32 %rd9, %r0, 4; add.s64 %rd9, %rd0, %rd9; mov.b32 %r2, 1;"
SHARED = "shl.b32 %r2, %r0, 2; mov.b32 %r3, smem; add.s32 %r3, %r3, %r2;"
BARRIER = """
    setp.ne.b32 %p0, %r0, 0;
    @%p0 bra READY;
    mov.b32 %r5, 1; mbarrier.init.shared.b64 [smem+512], %r5;
    fence.mbarrier_init.release.cluster;
    READY: bar.sync 0; mov.b32 %r6, 64;
    """
BULK = (
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [smem], [%rd0], 64,"
    " [smem+512];"
)


def wait(parity: int) -> str:
    return f"AGAIN: mbarrier.try_wait.parity.shared.b64 %p1, [smem+512], {parity}; @!%p1 bra AGAIN;"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (OFFSET + "st.global.b32 [%rd9+4], %r2;", "outside of every buffer: x of 256 bytes at 256"),
        (OFFSET + "st.global.b32 [%rd9+-4], %r2;", "outside of every buffer"),
        ("ld.global.b32 %r4, [%rd0+2];", "global address is not a multiple of 4"),
        ("mov.b32 %r2, 1; st.global.b32 [%rd0], %r2;", "two threads store a global byte"),
        (
            OFFSET + "ld.global.nc.b32 %r4, [%rd0]; st.global.b32 [%rd9], %r2;",
            "stores a byte that ld.global.nc loads",
        ),
        (
            OFFSET + "st.global.b32 [%rd9], %r2; ld.global.b32 %r4, [%rd0];",
            "loaded that another thread stores",
        ),
        (SHARED + "ld.shared.b32 %r4, [%r3];", "shared byte 0 of CTA 0 is never written"),
        (SHARED + "st.shared.b32 [%r3+1000], %r0;", "outside of the 1024 bytes"),
        (SHARED + "st.shared.b32 [%r3+2], %r0;", "shared address is not a multiple of 4"),
        (SHARED + "st.shared.b32 [smem], %r0;", "race: .* stored"),
        (
            SHARED + "st.shared.b32 [%r3], %r0; xor.b32 %r3, %r3, 128; ld.shared.b32 %r4, [%r3];",
            "race: .* is loaded in line",
        ),
        (
            SHARED + "st.shared.b32 [%r3], %r0; bar.sync 0; ld.shared.b32 %r4, [smem];"
            "st.shared.b32 [%r3], %r0;",
            "race: .* is stored in line .* and loaded",
        ),
        (
            SHARED + "cp.async.ca.shared.global [%r3], [%rd0], 4; cp.async.commit_group;"
            "ld.shared.b32 %r4, [%r3]; cp.async.wait_group 0;",
            "still being copied",
        ),
        (
            SHARED + "cp.async.ca.shared.global [%r3], [%rd0], 4; cp.async.commit_group;",
            "nobody waits",
        ),
        (
            BARRIER + "@%p0 bra OUT; mbarrier.arrive.expect_tx.shared.b64 %rd9, [smem+512], %r6;"
            f"{BULK} OUT: ld.shared.b32 %r4, [smem];",
            "still being copied|never written",
        ),
        (
            # Warp 0 waits, warp 1 does not.
            BARRIER + "@%p0 bra OUT; mbarrier.arrive.expect_tx.shared.b64 %rd9, [smem+512], %r6;"
            + BULK + "OUT: setp.gt.u32 %p2, %r0, 31; @%p2 bra PAST;" + wait(0)
            + "bra.uni END; PAST: mov.b32 %r7, 0; END: ld.shared.b32 %r4, [smem];",
            "still being copied",
        ),
        (BARRIER + wait(0), "deadlock: 64 threads of CTAs \\[0\\]"),
        (BARRIER + "mbarrier.init.shared.b64 [smem+512], %r6;", "initialised twice|an mbarrier"),
        (BARRIER + "st.shared.b32 [smem+516], %r6;", "is an mbarrier"),
        ("setp.gt.u32 %p0, %r0, 31; @%p0 bra OUT; bar.sync 0; OUT: mov.b32 %r2, 0;", "deadlock"),
        (
            "setp.gt.u32 %p0, %r0, 40; @%p0 bra OUT; shfl.sync.bfly.b32 %r2, %r0, 1, 31, -1;"
            "OUT: mov.b32 %r2, 0;",
            "deadlock: 9 threads of CTAs .* shfl",
        ),
        ("HERE: bra.uni HERE;", "an endless loop"),
        ("barrier.cluster.wait;", "without having arrived"),
        ("sin.approx.f32 %r2, %r2;", "sin.approx.f32 is not modelled"),
        ("bra.uni NOWHERE;", "no label NOWHERE"),
    ],
)  # fmt: skip
def test_what_a_kernel_may_not_do(body: str, problem: str) -> None:
    with pytest.raises(PtxError, match=problem) as error:
        execute(body, {"x": np.zeros(THREADS, np.uint32)})
    assert re.search(r"line \d+", str(error.value))


def test_copies_arrive_for_those_who_wait() -> None:
    body = f"""
        {BARRIER}
        @%p0 bra OUT; mbarrier.arrive.expect_tx.shared.b64 %rd9, [smem+512], %r6; {BULK}
        OUT: {wait(0)}
        and.b32 %r7, %r0, 15; shl.b32 %r7, %r7, 2; mov.b32 %r8, smem; add.s32 %r7, %r7, %r8;
        ld.shared.b32 %r9, [%r7];
        mul.wide.u32 %rd9, %r0, 4; add.s64 %rd9, %rd1, %rd9; st.global.b32 [%rd9], %r9;
        """
    source = np.arange(16, dtype=np.uint32)
    found = execute(body, {"x": source, "out": np.zeros(THREADS, np.uint32)})
    assert np.array_equal(found["out"], np.resize(source, THREADS))


REMOTE = """
    mov.b32 %r7, 256; @%p0 bra OUT;
    mbarrier.arrive.expect_tx.shared.b64 %rd9, [smem+512], %r7;
    OUT: barrier.cluster.arrive; {wait_for_all}
    xor.b32 %r8, %r1, 1; mov.b32 %r9, smem;
    shl.b32 %r10, %r0, 2; add.s32 %r10, %r10, %r9; add.s32 %r11, %r9, 512;
    mapa.shared::cluster.u32 %r12, %r10, %r8; mapa.shared::cluster.u32 %r13, %r11, %r8;
    mad.lo.s32 %r14, %r1, 1000, %r0;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r12], %r14, [%r13];
    """


def test_ctas_store_to_each_other() -> None:
    send = REMOTE.format(wait_for_all="barrier.cluster.wait;")
    body = f"""
        {BARRIER} {send} {wait(0)}
        ld.shared.b32 %r15, [%r10];
        mad.lo.s32 %r16, %r1, 64, %r0; mul.wide.u32 %rd9, %r16, 4; add.s64 %rd9, %rd0, %rd9;
        st.global.b32 [%rd9], %r15;
        """
    found = execute(body, {"out": np.zeros(2 * THREADS, np.uint32)}, cluster=2)["out"]
    thread = np.arange(THREADS)
    assert np.array_equal(found, np.concatenate([1000 + thread, thread]))
    with pytest.raises(PtxError, match=r"race: .* of CTA 1 .* by warp 0 of CTA 0"):
        execute(BARRIER + REMOTE.format(wait_for_all="") + wait(0), cluster=2)
    with pytest.raises(PtxError, match=r"nobody waits|arrive after CTA"):
        execute(BARRIER + send, cluster=2)


def test_the_grid_is_run_cluster_by_cluster() -> None:
    body = """
        mov.u32 %r2, %ctaid.y; mov.u32 %r3, %ctaid.z;
        mov.u32 %r4, %nctaid.y; mov.u32 %r5, %nctaid.x;
        mad.lo.s32 %r6, %r3, %r4, %r2; mad.lo.s32 %r6, %r6, %r5, %r1;
        mul.wide.u32 %rd9, %r6, 4; add.s64 %rd9, %rd0, %rd9;
        setp.eq.b32 %p0, %r0, 0; @%p0 st.global.b32 [%rd9], %r6;
        """
    found = execute(body, {"out": np.zeros(24, np.uint32)}, cluster=2, grid=(4, 3, 2))["out"]
    assert np.array_equal(found, np.arange(24))


STREAM = """
.version 9.4
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 p0, .param .u64 p1, .param .u32 p2)
{{
    .reg .pred %p<4>; .reg .b32 %r<8>; .reg .b64 %rd<8>;
    ld.param.b64 %rd0, [p0];
    ld.param.b64 %rd1, [p1];
    ld.param.b32 %r0, [p2];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd0, %rd0, %rd2;
    add.s64 %rd1, %rd1, %rd2;
    {body}
    ret;
}}
"""
SEND = "add.s32 %r2, %r1, %r0; st.relaxed.sys.global.b32 [%rd1], %r2;"
RECEIVE = """
L: ld.relaxed.sys.global.b32 %r3, [%rd0];
   setp.eq.b32 %p0, %r3, 0;
   @%p0 bra L;
"""


def exchange(body: str) -> dict[str, npt.NDArray[Any]]:
    """Two streams run instructions; %rd0 is the own word of a thread, %rd1 that of its peer."""
    memory = GlobalMemory({"a": np.zeros(THREADS, np.uint32), "b": np.zeros(THREADS, np.uint32)})
    streams = [
        [Launch(ctas=1, parameters=(own, peer, 5 + i), owned=(own,))]
        for i, (own, peer) in enumerate([("a", "b"), ("b", "a")])
    ]
    run_streams(STREAM.format(body=body), streams, memory, block=THREADS)
    return {name: memory.bytes(name).view(np.uint32) for name in "ab"}


def test_streams_wait_for_each_others_words() -> None:
    found = exchange(SEND + RECEIVE)
    assert np.array_equal(found["a"], np.arange(THREADS) + 6)
    assert np.array_equal(found["b"], np.arange(THREADS) + 5)


def test_a_thread_may_store_weakly_what_it_has_polled() -> None:
    found = exchange(SEND + RECEIVE + "st.global.b32 [%rd0], 0;")
    assert not any(words.any() for words in found.values())


def test_streams_that_wait_for_ever_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ptx_machine.streams.MOST_TURNS", 100)
    with pytest.raises(PtxError, match="2 streams do not end"):
        exchange(RECEIVE)


@pytest.mark.parametrize(
    "body",
    [
        SEND + RECEIVE.replace(".relaxed.sys", ""),
        SEND.replace(".relaxed.sys", "") + RECEIVE,
        SEND + "st.global.b32 [%rd0], 0;",
    ],
)
def test_weak_accesses_of_what_others_access_are_refused(body: str) -> None:
    with pytest.raises(PtxError, match="weakly"):
        exchange(body)
