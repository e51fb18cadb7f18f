"""Times programs in turns, so that drift of the machine meets all of them alike."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import numpy as np

SAMPLES = 15
SAMPLE_SECONDS = 0.012
WARM_UP_CALLS = 4


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Microseconds a layer: median and spread of the samples, and the host's part."""

    us: float
    p10: float
    p90: float
    host_us: float  # until the calls were enqueued; near `us`, the host was the limit

    def rounded(self) -> dict[str, float]:
        return {name: round(value, 3) for name, value in asdict(self).items()}


@dataclass(frozen=True, kw_only=True)
class Program:
    """`call` enqueues `layers` layers on the device and `wait` returns when all are done."""

    call: Callable[[], None]
    wait: Callable[[], None]
    layers: int


def time_in_turns(programs: Mapping[str, Program]) -> dict[str, Timing]:
    """A Timing for each program; each sample runs every program once for SAMPLE_SECONDS."""
    calls = {name: _calls_a_sample(program) for name, program in programs.items()}
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    for _ in range(SAMPLES):
        for name, program in programs.items():
            samples[name].append(_sample(program, calls[name]))
    return {name: _timing(values) for name, values in samples.items()}


def _calls_a_sample(program: Program) -> int:
    for _ in range(WARM_UP_CALLS):
        program.call()
    program.wait()
    _, total_us = _sample(program, 4)
    return max(4, round(SAMPLE_SECONDS * 1e6 / (total_us * program.layers)))


def _sample(program: Program, calls: int) -> tuple[float, float]:
    start = time.perf_counter()
    for _ in range(calls):
        program.call()
    enqueued = time.perf_counter()
    program.wait()
    done = time.perf_counter()
    unit = 1e6 / (calls * program.layers)
    return (enqueued - start) * unit, (done - start) * unit


def _timing(samples: list[tuple[float, float]]) -> Timing:
    host, total = np.array(samples).T
    p10, median, p90 = np.percentile(total, [10, 50, 90])
    return Timing(us=float(median), p10=float(p10), p90=float(p90), host_us=float(np.median(host)))
