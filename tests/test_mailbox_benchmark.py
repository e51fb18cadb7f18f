"""time_mailbox.py: its arithmetic, and all of its run but the times, on a GPU that is none."""

import json
import pathlib
import subprocess
import sys
from typing import Any

import environment
import jax
import mailbox_chains
import numpy as np
import pytest
import tables
import time_mailbox
import virtual_ranks
import workload
from benchmark_facts import FACTS
from fake_launches import FakeLaunches, mixed
from shapes import CHECKED_BATCHES, CHECKED_HEADS, TIMED_HEADS

from jax_mla.runtime import device, loader, peer_memory

RANKS, BATCHES = (2, 3), (1, 9)


def queries(rows: Any, q_norm: Any, kv_norm: Any, w_qb: Any, w_uk: Any, *_: Any, **__: Any) -> Any:
    """What the kernels of FakeLaunches compute."""
    heads = np.asarray(w_qb).reshape(len(w_uk), -1, w_qb.shape[-1])
    return mixed(np.asarray(rows), heads, np.asarray(w_uk)), None


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeLaunches:
    driver = FakeLaunches()
    for module in (device, loader, peer_memory, virtual_ranks):
        monkeypatch.setattr(module, "bindings", lambda: driver)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(mailbox_chains, "_jitted", lambda: queries)
    monkeypatch.setattr(mailbox_chains, "CALLS", 3)
    monkeypatch.setattr(workload, "MAX_LAYERS", 2)
    monkeypatch.setattr(time_mailbox, "SAMPLES", 2)
    monkeypatch.setattr(time_mailbox, "SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(environment, "gpu_query", lambda *fields: dict.fromkeys(fields, "some"))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    return driver


def run(
    patch: pytest.MonkeyPatch, folder: pathlib.Path, ranks: tuple[int, ...] = RANKS
) -> tuple[int, dict[str, Any]]:
    """Runs the program; returns its status and what it wrote."""
    output = folder / "mailbox_some.json"
    sizes = ["--ranks", *ranks, "--heads", 1, "--batch", *BATCHES]
    options = [*sizes, "--commit", "abc", "--output", output]
    patch.setattr(sys, "argv", ["time_mailbox.py", *map(str, options)])
    status = time_mailbox.main()
    return status, json.loads(output.read_text())


def test_every_shape_is_checked_timed_and_recorded(
    gpu: FakeLaunches, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    status, written = run(monkeypatch, tmp_path)
    assert status == 0
    assert written["environment"]["commit"] == "abc"
    assert [(row["ranks"], row["batch"]) for row in written["rows"]] == [
        (ranks, batch) for ranks in RANKS for batch in BATCHES
    ]
    for row in written["rows"]:
        assert row["calls"] == 4  # two layers, twice
        assert row["target"].keys() == row["floor_share"].keys() < row["adds"].keys()
        assert all(time["us"] > 0 for time in row["timings"].values())
    assert len(tables.tables(tmp_path).splitlines()) == 2 + 2 + len(written["rows"])
    assert +gpu.live == {}


def test_ranks_have_streams_and_grids_of_their_own(
    gpu: FakeLaunches, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    run(monkeypatch, tmp_path, ranks=(3,))
    grids: dict[str, set[Any]] = {}
    streams: dict[str, set[int]] = {}
    for symbol, stream, grid in gpu.grids:
        grids.setdefault(symbol, set()).add(grid)
        streams.setdefault(symbol, set()).add(stream)
    assert grids == {
        "exchange_0": {(1, 1, 1), (4, 1, 1)},  # 9 * 36 * 3 words
        "small_c16_t1_0": {(16, 1, 1), (16, 3, 1)},
        "tiled_c8_t16_0": {(8, 1, 1), (8, 3, 1)},
    }
    assert len(streams["exchange_0"]) == 2 * 3  # for each batch


def test_a_call_that_gives_up_fails_its_shape_and_the_run(
    gpu: FakeLaunches,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpu.silent.add(2)
    status, written = run(monkeypatch, tmp_path)
    assert status == 1
    failed = [row for row in written["rows"] if "failure" in row]
    assert [row["ranks"] for row in failed] == [3, 3]
    assert all("timings" not in row for row in failed)
    assert "virtual rank 0 waited 2 s in vain for rank 2" in failed[0]["failure"]
    assert failed[0]["failure"] in capsys.readouterr().out
    assert "| 3 | 1 | 9 | - | - | - | - | gave up |" in tables.tables(tmp_path)
    assert +gpu.live == {}


def test_wrong_bytes_end_the_run(
    gpu: FakeLaunches, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    gpu.flip = 1
    with pytest.raises(SystemExit, match="rank 0 gathered other bytes"):
        run(monkeypatch, tmp_path)
    gpu.flip = 0
    monkeypatch.setattr(
        mailbox_chains, "_jitted", lambda: lambda *x, **_: (queries(*x)[0] ^ np.uint8(1), None)
    )
    with pytest.raises(SystemExit, match=r"other queries than jax_mla\.q_absorb"):
        run(monkeypatch, tmp_path)


def test_calls_that_do_not_fit_at_once_are_refused(
    gpu: FakeLaunches, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    occupancy = "_cuOccupancyMaxActiveBlocksPerMultiprocessor"
    monkeypatch.setattr(gpu, occupancy, lambda *_: 0)
    with pytest.raises(SystemExit, match="2 virtual ranks need 4 CTAs at once, the GPU runs 0"):
        run(monkeypatch, tmp_path)


def test_floors_count_four_passes_of_what_is_received() -> None:
    received = 3 * 8 * 12 * 576
    assert time_mailbox.floor_us(4, 8, 12) == pytest.approx(4 * received / 2e6)
    assert time_mailbox.floor_us(4, 8, 12, sharing=4) == pytest.approx(16 * received / 2e6)


def test_the_target_has_the_bytes_from_nine_tokens_on() -> None:
    assert time_mailbox.target_us(8, 8, 16) == 2.5
    floor = time_mailbox.floor_us(8, 9, 16, sharing=8)
    assert time_mailbox.target_us(8, 9, 16) == 2.5 + floor > 10


def samples_of(*totals: float) -> list[tuple[float, float]]:
    return [(0.5, total) for total in totals]


SAMPLES = {
    # The machine slows down tenfold in the end: differences of neighbours are what they were.
    "q_absorb": samples_of(10.0, 11.0, 100.0),
    "q_absorb and exchange": samples_of(12.5, 13.25, 102.0),
    "exchange": samples_of(2.75, 3.0, 2.5),
    "one rank": samples_of(5.0, 5.0, 5.0),
    "all heads": samples_of(9.0, 8.0, 10.0),
}


def test_additions_are_medians_of_differences_side_by_side() -> None:
    adds = time_mailbox.additions(SAMPLES)
    assert adds["exchange alone"] == {"us": 2.75, "p10": 2.55, "p90": 2.95}
    assert adds["beside q_absorb"] == {"us": 2.25, "p10": 2.05, "p90": 2.45}
    assert adds["all heads instead"]["us"] == 4.0


def test_each_way_of_timing_has_a_verdict() -> None:
    row = time_mailbox.result(2, 6, 8, SAMPLES)
    assert row["target_us"] == 2.5
    assert row["target"] == {"exchange alone": "missed", "beside q_absorb": "met"}
    floor = 2 * 4 * 8 * 6 * 576 / 2e6
    assert row["floor_share"]["beside q_absorb"] == pytest.approx(floor / 2.25, abs=1e-3)
    assert row["timings"]["one rank"] == {"us": 5, "p10": 5, "p90": 5, "host_us": 0.5}


def test_the_table_is_made_from_the_results(tmp_path: pathlib.Path) -> None:
    row = {"ranks": 2, "heads": 6, "batch": 8} | time_mailbox.result(2, 6, 8, SAMPLES)
    results = {"environment": FACTS, "rows": [row]}
    (tmp_path / "mailbox_gpu.json").write_text(json.dumps(results))
    lines = tables.tables(tmp_path).splitlines()
    assert "(benchmarks/results/mailbox_gpu.json)" in lines[0]
    assert lines[-1] == (
        "| 2 | 6 | 8 | 2.5 | 2.8 (2.5 to 3.0) | 2.2 (2.0 to 2.5) | 4.0 (3.2 to 4.8) |"
        " missed exchange alone, met beside q_absorb |"
    )
    assert tables.speed_files(tmp_path) == []


def test_timed_shapes_are_checked_shapes() -> None:
    assert set(time_mailbox.BATCHES) <= set(CHECKED_BATCHES)
    assert {n * h for n in time_mailbox.RANKS for h in TIMED_HEADS} <= {*CHECKED_HEADS}


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="there is a GPU to time")
def test_timing_without_a_gpu_ends_with_a_sentence() -> None:
    program = environment.ROOT / "benchmarks" / "time_mailbox.py"
    found = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, check=False, timeout=120
    )
    assert found.returncode == 1
    assert found.stderr == "timing needs an NVIDIA GPU, JAX found cpu. Run `python -m jax_mla`.\n"
