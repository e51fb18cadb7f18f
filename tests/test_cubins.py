"""The shipped cubins: what the manifest says is what the machine code is."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from build_modules import build_module

import jax_mla
from jax_mla.variants import ABI, ARCHS, EXCHANGE, PLAIN_VARIANTS, SHIPPED, THREADS

CUBINS = Path(jax_mla.__path__[0]) / "cubins"
MANIFEST = json.loads((CUBINS / "manifest.json").read_text())
KERNELS: list[dict[str, Any]] = MANIFEST["kernels"]
Q_ABSORB = [entry for entry in KERNELS if entry["key"] != EXCHANGE.key]
SHARED_BYTES = 232_448
"""What a CTA may opt in to on compute capability 9.0 and 10.x."""
SM_SHARED_BYTES = 233_472
SM_REGISTERS = 65_536


sass = build_module("sass")
sass.disassemble = functools.cache(sass.disassemble)  # type: ignore[attr-defined]  # a second each


def test_the_manifest_lists_every_variant_for_every_arch() -> None:
    assert MANIFEST["abi"] == ABI
    found = {(entry["key"], entry["arch"]) for entry in KERNELS}
    assert found == {(variant.key, arch) for arch in ARCHS for variant in SHIPPED[arch]}
    assert len(KERNELS) == len(found)


@pytest.mark.parametrize("entry", KERNELS, ids=lambda e: f"{e['arch']}-{e['key']}")
def test_a_cubin_is_what_the_manifest_says(entry: dict[str, Any]) -> None:
    cubin = CUBINS / entry["file"]
    assert hashlib.sha256(cubin.read_bytes()).hexdigest() == entry["sha256"]
    report = sass.lint(cubin)  # raises on spills, local memory and undefined uniform registers
    assert entry["shared_memory"] <= SHARED_BYTES
    assert report.registers == entry["registers"] <= SM_REGISTERS // THREADS
    assert report.params == entry["params"]
    assert entry["symbol"].encode() in cubin.read_bytes()


def offsets_and_sizes(entry: dict[str, Any]) -> list[tuple[int, int]]:
    return [(param["offset"], param["size"]) for param in entry["params"]]


@pytest.mark.parametrize("entry", Q_ABSORB, ids=lambda e: f"{e['arch']}-{e['key']}")
def test_the_library_passes_what_a_kernel_takes(entry: dict[str, Any]) -> None:
    # Ten pointers, row stride, cache rows, batch, eps: what the FFI library passes. General forms
    # then have three pointers, rows of the table, style and cache format.
    options = entry["form"] != "plain"
    sizes = [8] * 12 + [4] * 2 + ([8] * 3 + [4] * 3 if options else [])
    offsets = [*range(0, 97, 8), 100, *([104, 112, 120, 128, 132, 136] if options else [])]
    assert offsets_and_sizes(entry) == list(zip(offsets, sizes, strict=True))


@pytest.mark.parametrize("arch", ARCHS)
def test_the_library_passes_what_the_gather_takes(arch: str) -> None:
    # Queries, result, control block; batch, words a token, replacement.
    places = [(0, 8), (8, 8), (16, 8), (24, 4), (28, 4), (32, 4)]
    assert offsets_and_sizes(entry_of(EXCHANGE.key, arch)) == places


def entry_of(key: str, arch: str) -> dict[str, Any]:
    [entry] = [entry for entry in KERNELS if (entry["key"], entry["arch"]) == (key, arch)]
    return entry


GENERAL = [entry for entry in KERNELS if entry["form"] != "plain"]


@pytest.mark.parametrize("entry", GENERAL, ids=lambda e: f"{e['arch']}-{e['key']}")
def test_a_general_form_is_launched_like_the_plain_one(entry: dict[str, Any]) -> None:
    plain = entry_of(entry["key"].removesuffix(f"_{entry['form']}"), entry["arch"])
    for field in ("block", "cluster", "tokens", "shared_memory", "carveout"):
        assert entry[field] == plain[field]


@pytest.mark.parametrize("key", ["small_c8_t1", "small_c16_t1", "tiled_c8_t8"])
def test_two_ctas_fit_an_sm_where_the_choice_counts_on_it(key: str) -> None:
    for entry in KERNELS:
        if entry["key"].startswith(key):
            assert 2 * (entry["shared_memory"] + 1024) <= SM_SHARED_BYTES
            assert 2 * THREADS * entry["registers"] <= SM_REGISTERS


def opcodes(key: str, arch: str) -> list[str]:
    text = sass.disassemble(CUBINS / arch / f"{key}.cubin")
    return [opcode for opcode, _ in sass.instructions(text)]


@pytest.mark.parametrize("arch", ARCHS)
def test_tensor_cores_and_bulk_copies_are_used(arch: str) -> None:
    for variant in set(SHIPPED[arch]) - {EXCHANGE}:
        names = opcodes(variant.key, arch)
        assert any(name.startswith("HMMA") for name in names) == (variant.kernel != "small")
        # Where the weights do not go straight into registers.
        assert any(name.startswith("UBLKCP") for name in names) == (variant.kernel != "resident")
        assert "ACQBULK" in names, "the wait for the previous kernel"


@pytest.mark.parametrize("arch", ARCHS)
def test_only_the_gather_reaches_beyond_its_device(arch: str) -> None:
    """And does so without fences: the protocol needs none."""
    exchange = set(opcodes(EXCHANGE.key, arch))
    assert {"LDG.E.128.STRONG.SYS", "STG.E.128.STRONG.SYS", "STG.E.STRONG.SYS"} <= exchange
    assert any(name.startswith("ATOMG.E.INC") for name in exchange)
    assert not any(name.startswith(("MEMBAR", "FENCE", "RED")) for name in exchange)
    for variant in set(SHIPPED[arch]) - {EXCHANGE}:
        names = opcodes(variant.key, arch)
        assert not any(name.startswith("ATOM") or ".SYS" in name for name in names)


def test_packed_fp32_where_the_gpu_has_it() -> None:
    for variant in PLAIN_VARIANTS:
        assert any(name.startswith("FFMA2") for name in opcodes(variant.key, "sm_100a"))
        assert not any(name.startswith("FFMA2") for name in opcodes(variant.key, "sm_90a"))


def matrix_span(key: str, arch: str) -> tuple[int, int]:
    """MMAs of a kernel, and register moves between the first and the last one."""
    names = opcodes(key, arch)
    at = [i for i, name in enumerate(names) if name.startswith("HMMA")]
    moves = [name for name in names[at[0] : at[-1]] if name.startswith(("MOV", "IMAD.MOV"))]
    return len(at), len(moves)


@pytest.mark.parametrize(
    "entry",
    [entry for entry in GENERAL if not entry["key"].startswith("small")],
    ids=lambda e: f"{e['arch']}-{e['key']}",
)
def test_mmas_take_their_operands_where_they_lie(entry: dict[str, Any]) -> None:
    """A store of fragments once made the compiler move every operand of every MMA."""
    key, arch = entry["key"], entry["arch"]
    mmas, moves = matrix_span(key, arch)
    plain_mmas, plain_moves = matrix_span(key.removesuffix(f"_{entry['form']}"), arch)
    assert mmas >= plain_mmas
    assert moves <= plain_moves + mmas / 4


MISCOMPILED = """
        /*0010*/                   UMOV UR6, 0x400 ;
        /*0020*/                   UMOV UR7, 0x14f00000 ;
        /*0030*/              @P0 LDGSTS.E.BYPASS.128 [R4+UR0+0x16000], desc[UR1][R2.64] ;
"""


def test_the_lint_finds_uniform_registers_that_nothing_writes() -> None:
    assert sass.undefined_uniforms(MISCOMPILED) == [
        "LDGSTS.E.BYPASS.128 [R4+UR0+0x16000], desc[UR1][R2.64]"
    ]
    repaired = MISCOMPILED.replace("UR0", "UR6").replace("desc[UR1]", "desc[UR6]")
    assert sass.undefined_uniforms(repaired) == []


def test_the_lint_sees_both_halves_of_a_pair() -> None:
    text = "/*0010*/ ULDC.64 UR4, c[0x0][0x210] ;\n/*0020*/ LDG.E R2, desc[UR4][R2.64] ;"
    assert sass.undefined_uniforms(text) == []
    assert sass.undefined_uniforms(text.replace("ULDC.64", "ULDC")) == [
        "LDG.E R2, desc[UR4][R2.64]"
    ]


@pytest.mark.parametrize("instruction", ["STL [R1], R2", "LDL.LU R2, [R1]"])
def test_the_lint_refuses_spills(instruction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "disassemble", lambda cubin: f"/*0010*/ {instruction} ;")
    with pytest.raises(sass.LintError, match="spill"):
        sass.lint(Path("x.cubin"))
