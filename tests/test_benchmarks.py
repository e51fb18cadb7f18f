"""The benchmark's arithmetic, its peer, and the tables that the README quotes."""

import functools
import itertools
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable

import clock
import environment
import jax
import jax.numpy as jnp
import numpy as np
import peer
import plot
import pytest
import support
import tables
import time_q_absorb
import workload
from benchmark_facts import FACTS
from clock import Program, time_in_turns
from forced import forced_variant
from shapes import CHECKED_BATCHES, CHECKED_HEADS, TIMED_BATCHES, TIMED_HEADS
from workload import Chain, Workload

import jax_mla
from jax_mla import variants
from jax_mla.testing import bytes_of, e4m3_steps, make_inputs

RESULTS = {
    "environment": FACTS,
    "rows": [
        {
            "heads": 6,
            "batch": 8,
            "floor_us": 1.0,
            "variant": "tiled",
            "timings": {
                "jax_mla": {"us": 4.0, "p10": 3.9, "p90": 4.2},
                "jnp": {"us": 30.0, "p10": 29.0, "p90": 31.0},
            },
        }
    ],
}


def test_the_readme_has_the_tables_of_what_is_committed() -> None:
    readme = tables.README.read_text()
    assert tables.with_tables(readme) == readme


def test_the_table_of_models_says_what_the_gpu_tests_cover() -> None:
    lines = [re.split(r" *\| *", line)[1:-1] for line in support.table().splitlines()[2:]]
    assert {cell for line in lines for cell in line[3:]} == {"verified", "compiles", "no"}
    kimi = [line for line in lines if line[0] == "Kimi-K3"]
    assert kimi == [
        ["Kimi-K3", "1, 2, 4, 8, 16", "96, 48, 24, 12, 6", "verified", "compiles", "compiles"]
    ]
    for model, _, heads, *states in lines:
        for number in map(int, heads.split(", ")):
            assert number in CHECKED_HEADS or "verified" not in states, model


def test_every_committed_result_beats_the_peer() -> None:
    files = tables.speed_files(environment.RESULTS)
    assert files
    for file in files:
        for row in json.loads(file.read_text())["rows"]:
            assert row["timings"]["jax_mla"]["us"] < row["timings"]["jnp"]["us"], row


def test_the_table_is_made_from_the_results(tmp_path: pathlib.Path) -> None:
    (tmp_path / "gpu.json").write_text(json.dumps(RESULTS))
    lines = tables.tables(tmp_path).splitlines()
    assert lines[-1] == "| 6 | 8 | 1.0 | 30.0 | 4.0 | 3.9 to 4.2 | 7.5 | 25% | `tiled` |"


def test_the_picture_has_every_time_of_the_results_once() -> None:
    results = json.loads(json.dumps(RESULTS))
    slower = {"jax_mla": {"us": 5.0}, "jnp": {"us": 40.0}}
    results["rows"].append({"heads": 6, "batch": 16, "floor_us": 2.0, "timings": slower})
    results["rows"].append({"heads": 12, "batch": 8, "floor_us": 3.0, "timings": slower})
    assert plot.series(results) == {
        6: {
            "jnp in jit": {8: 30.0, 16: 40.0},
            "jax_mla": {8: 4.0, 16: 5.0},
            "floor": {8: 1.0, 16: 2.0},
        },
        12: {"jnp in jit": {8: 40.0}, "jax_mla": {8: 5.0}, "floor": {8: 3.0}},
    }


def test_the_picture_is_drawn_from_the_committed_results() -> None:
    assert plot.source(environment.RESULTS) in plot.PICTURE.read_text(encoding="utf-8")


def test_a_readme_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="once each"):
        tables.with_part("<!-- speed: end -->", "speed", "table")


def test_timed_shapes_are_checked_shapes() -> None:
    assert set(TIMED_HEADS) <= set(CHECKED_HEADS)
    assert set(TIMED_BATCHES) <= set(CHECKED_BATCHES)


def test_the_floor_is_bytes_for_few_tokens_and_flops_for_many() -> None:
    one, many = Workload(16, 1), Workload(16, 4096)
    assert one.floor_us == pytest.approx(one.weight_bytes / 4.44e6, rel=0.01)
    assert many.floor_us == pytest.approx(many.weight_bytes * 4096 / 790e6, rel=0.01)


def test_the_peer_does_the_same_work() -> None:
    inputs = make_inputs(3, 2, pages=2, page_size=8)
    scales = {"q_scale": jnp.float32(0.05), "k_scale": jnp.float32(0.05)}
    q, cache = jax.jit(peer.q_absorb)(**inputs, **scales)
    call = jax.jit(lambda **x: jax_mla.q_absorb(**x, implementation="reference"))
    expected_q, expected_cache = call(**inputs, **scales)
    assert (e4m3_steps(cache, expected_cache) > 0).mean() < 0.001
    # A CPU may sum the peer's BF16 products in BF16; on a GPU the benchmark compares bytes.
    q, expected_q = (np.asarray(x, np.float32) for x in (q, expected_q))
    assert np.linalg.norm(q - expected_q) < 0.05 * np.linalg.norm(expected_q)


@pytest.mark.parametrize("name", time_q_absorb.ROTATED)
def test_rotating_programs_rotate(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    ours = functools.partial(jax_mla.q_absorb, implementation="reference")
    monkeypatch.setattr(time_q_absorb, "OURS", ours)
    inputs = make_inputs(3, 2, pages=2, page_size=8)
    q, cache = time_q_absorb.rotated(name)(*inputs.values(), q_scale=0.5, k_scale=0.5)
    plain, stored = ours(**inputs, q_scale=0.5, k_scale=0.5)
    for turned, still in ((q, plain), (cache, stored)):
        assert (bytes_of(turned)[..., :512] == bytes_of(still)[..., :512]).all()
    # The first token is at position 0, which nothing rotates.
    assert (bytes_of(q) != bytes_of(plain)).any(axis=(1, 2)).tolist() == [False, True, True]


@pytest.mark.parametrize(("alone", "queries"), [(False, 4), (True, 2)])
def test_a_chain_runs_and_keeps_its_buffers(
    monkeypatch: pytest.MonkeyPatch, alone: bool, queries: int
) -> None:
    monkeypatch.setattr(workload, "MAX_LAYERS", 2)
    monkeypatch.setattr(workload, "CALLS", 4)
    small = Workload(1, 2, alone)
    chain = Chain(small.lower(peer.q_absorb).compile(), small, small.weights())
    pointers = {query.unsafe_buffer_pointer() for query in chain.queries}
    program = chain.program()
    assert program.layers == 4
    program.call()
    program.wait()
    assert {query.unsafe_buffer_pointer() for query in chain.queries} == pointers
    assert len({np.asarray(query).tobytes() for query in chain.queries}) == queries


class Machine:
    """A clock that only programs move: enqueuing a call takes 10 us, running it `call_us`."""

    def __init__(self) -> None:
        self._now_us, self._queued_us = 0.0, 0.0

    def perf_counter(self) -> float:
        return self._now_us / 1e6

    def program(self, call_us: Callable[[], float], layers: int) -> Program:
        def call() -> None:
            self._now_us += 10
            self._queued_us += call_us() - 10

        return Program(call=call, wait=self._wait, layers=layers)

    def _wait(self) -> None:
        self._now_us += self._queued_us
        self._queued_us = 0


def test_programs_are_timed_in_microseconds_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    monkeypatch.setattr(clock, "time", machine)
    slower = itertools.count(300)
    programs = {
        "steady": machine.program(lambda: 1000, layers=10),
        "drifting": machine.program(lambda: next(slower), layers=1),
    }
    timings = time_in_turns(programs)
    steady, drifting = timings["steady"], timings["drifting"]
    assert steady.rounded() == {"us": 100, "p10": 100, "p90": 100, "host_us": 1}
    assert 300 < drifting.p10 < drifting.us < drifting.p90
    assert drifting.host_us == pytest.approx(10)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="there is a GPU to time")
def test_timing_without_a_gpu_ends_with_a_sentence() -> None:
    run = subprocess.run(
        [sys.executable, environment.ROOT / "benchmarks" / "time_q_absorb.py"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert run.stderr == "timing needs an NVIDIA GPU, JAX found cpu. Run `python -m jax_mla`.\n"


def test_a_missing_nvidia_smi_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match=r"nvidia-smi was not found.* Install it"):
        environment.gpu_query("name")


@pytest.mark.parametrize("key", [variant.key for variant in variants.PLAIN_VARIANTS])
def test_a_forced_variant_is_the_one_in_the_program(key: str) -> None:
    inputs = make_inputs(1, 2, pages=2, page_size=8)
    jitted = jax.jit(lambda x: jax_mla.q_absorb(**x, implementation="cuda"))
    usual = variants.choose
    with forced_variant(key):
        program = jitted.trace(inputs).lower(lowering_platforms=("cuda",)).as_text()
    assert f'kernel = "{key}"' in program
    assert variants.choose is usual


def test_an_unknown_variant_names_those_there_are() -> None:
    with pytest.raises(KeyError, match="small_c8_t1"), forced_variant("none"):
        pass
