"""Times programs in turns, so that drift of the machine meets all of them alike."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

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


Samples = list[tuple[float, float]]
"""Microseconds a layer of each sample: until its calls were enqueued, and until they were done."""


def time_in_turns(programs: Mapping[str, Program]) -> dict[str, Timing]:
    """A Timing for each program."""
    return {name: timing(samples) for name, samples in sample_in_turns(programs).items()}


def sample_in_turns(
    programs: Mapping[str, Program], count: int = SAMPLES, seconds: float = SAMPLE_SECONDS
) -> dict[str, Samples]:
    """`count` samples of each program, each taken by running it for `seconds`, in turns."""
    calls = {name: _calls_a_sample(program, seconds) for name, program in programs.items()}
    samples: dict[str, Samples] = {name: [] for name in programs}
    for _ in range(count):
        for name, program in programs.items():
            samples[name].append(_sample(program, calls[name]))
    return samples


def _calls_a_sample(program: Program, seconds: float) -> int:
    for _ in range(WARM_UP_CALLS):
        program.call()
    program.wait()
    _, total_us = _sample(program, 4)
    return max(4, round(seconds * 1e6 / (total_us * program.layers)))


def _sample(program: Program, calls: int) -> tuple[float, float]:
    start = time.perf_counter()
    for _ in range(calls):
        program.call()
    enqueued = time.perf_counter()
    program.wait()
    done = time.perf_counter()
    unit = 1e6 / (calls * program.layers)
    return (enqueued - start) * unit, (done - start) * unit


def timing(samples: Samples) -> Timing:
    host, total = np.array(samples).T
    return Timing(**_spread(total), host_us=float(np.median(host)))


def host_bound(timings: Mapping[str, Mapping[str, float]]) -> str:
    """A remark on the programs that the host may have held back, by their `Timing.rounded`."""
    bound = [name for name, time in timings.items() if time["host_us"] > 0.9 * time["us"]]
    return f"  host-bound: {', '.join(bound)}" if bound else ""


def difference(more: Samples, less: Samples) -> dict[str, float]:
    """Microseconds a layer that one program takes beyond another, each sample beside the other's.

    Their turns are neighbours, so drift of the machine cancels.
    """
    beyond = np.array(more)[:, 1] - np.array(less)[:, 1]
    return {name: round(value, 3) for name, value in _spread(beyond).items()}


def _spread(values: npt.NDArray[np.float64]) -> dict[str, float]:
    p10, median, p90 = np.percentile(values, [10, 50, 90])
    return {"us": float(median), "p10": float(p10), "p90": float(p90)}
