"""Times what the gather of queries through mailboxes adds to q_absorb, on one GPU.

    python benchmarks/time_mailbox.py                       # writes results/mailbox_GPU.json
    python benchmarks/time_mailbox.py --ranks 2 --batch 1 8

The ranks are virtual: each has a mailbox and a stream of its own, all on this GPU. The chains are
in mailbox_chains.py; clock.py times them in turns, over the slowest rank. Microseconds a call:

    exchange                every rank publishes the same queries again and collects its peers'
    q_absorb                q_absorb of all ranks at once, then a meeting
    q_absorb and exchange   the same, and then the exchange
    one rank                q_absorb of one rank, the others idle
    all heads               q_absorb of one rank that has the Q_B of all ranks

"adds" has what the exchange takes by itself, what it adds to q_absorb of all ranks, and what a rank
pays that needs no exchange because it has all heads: "all heads" less "one rank". The latter two
are differences of samples taken side by side.

What these figures are not:
- Stores to peers go to this GPU's L2. NVLink, its latency and its rate are not in them.
- The words of all ranks pass through one memory, and all CTAs share the SMs. From many ranks, heads
  and tokens on that makes an exchange slower than where each rank has a GPU: "floor_us" counts the
  bytes of all ranks, "rank_floor_us" those of one.
- The q_absorb of all ranks compete for SMs and bandwidth, so "q_absorb" is no rank's latency; only
  differences from it mean something.
- A meeting is a call of a single word, in both chains. Without one, CTAs that poll for a rank whose
  q_absorb has not started would keep it from the SMs it needs, which on a GPU of its own it has. So
  the ranks enter the exchange together, and no skew between them is timed.
- A graph of many branches takes the host long to launch: where "host_us" is near "us", the host was
  the limit, and "us" an upper bound.

Target: the exchange adds at most 2.5 us for up to 8 tokens, and for more at most that and the time
to move the bytes at 2 TB/s: of what a rank receives, each byte is written to the mailbox, read,
written to the result, and emptied. A call that gives up waiting fails its shape, and the run.
"""

import argparse
import contextlib
import os
import pathlib
from typing import Any

import jax
from clock import Samples, difference, host_bound, sample_in_turns, timing
from environment import environment, write_results
from mailbox_chains import Chains, Weights
from shapes import TIMED_HEADS
from virtual_ranks import VirtualRanks
from workload import Workload

import jax_mla
from jax_mla import variants
from jax_mla.rules import ROW

RANKS = (2, 4, 8)
BATCHES = (1, 8, 64)
SAMPLES, SAMPLE_SECONDS = 31, 0.006
TIMEOUT = 2.0  # seconds that an exchange waits
PASSES = 4  # of a received byte through memory
BYTES_PER_US = 2e6  # 2 TB/s
TARGET_US, FEW_TOKENS = 2.5, 8


def floor_us(ranks: int, batch: int, heads: int, sharing: int = 1) -> float:
    """Time to move what `sharing` ranks receive, at 2 TB/s."""
    received = (ranks - 1) * batch * heads * ROW
    return sharing * PASSES * received / BYTES_PER_US


def target_us(ranks: int, batch: int, heads: int) -> float:
    """What an exchange may add where all ranks share a GPU."""
    return TARGET_US + (floor_us(ranks, batch, heads, ranks) if batch > FEW_TOKENS else 0)


def additions(samples: dict[str, Samples]) -> dict[str, dict[str, float]]:
    """What the exchange adds, and what all heads on every rank would cost instead."""
    alone = timing(samples["exchange"]).rounded()
    return {
        "exchange alone": {name: alone[name] for name in ("us", "p10", "p90")},
        "beside q_absorb": difference(samples["q_absorb and exchange"], samples["q_absorb"]),
        "all heads instead": difference(samples["all heads"], samples["one rank"]),
    }


def result(ranks: int, heads: int, batch: int, samples: dict[str, Samples]) -> dict[str, Any]:
    """The part of a row that follows from its samples."""
    adds = additions(samples)
    target, floor = target_us(ranks, batch, heads), floor_us(ranks, batch, heads, ranks)
    exchanges = ("exchange alone", "beside q_absorb")
    return {
        "floor_us": round(floor, 3),
        "rank_floor_us": round(floor_us(ranks, batch, heads), 3),
        "target_us": round(target, 3),
        "timings": {name: timing(values).rounded() for name, values in samples.items()},
        "adds": adds,
        "floor_share": {name: round(floor / adds[name]["us"], 3) for name in exchanges},
        "target": {name: "met" if adds[name]["us"] <= target else "missed" for name in exchanges},
    }


def measure(group: VirtualRanks, heads: int, batch: int, weights: Weights) -> dict[str, Any]:
    """One row of the results; a call that gives up makes a row that says so."""
    ranks = len(group.ranks)
    chains = Chains(group, heads, batch, weights)
    chains.check_room()
    row: dict[str, Any] = {
        "ranks": ranks,
        "heads": heads,
        "batch": batch,
        "layers": len(weights),
        "calls": chains.calls,
        "ctas": group.ctas(batch, chains.words),
        "variant": variants.choose(batch, heads).key,
        "all_heads_variant": variants.choose(batch, ranks * heads).key,
    }
    try:
        programs = chains.programs()
        gathering = programs["q_absorb and exchange"]
        chains.check(gathering)
        samples = sample_in_turns(programs, SAMPLES, SAMPLE_SECONDS)
        chains.check(gathering)
    except jax_mla.PeerTimeout as error:
        return row | {"failure": str(error)}
    return row | result(ranks, heads, batch, samples)


def measure_group(ranks: int, heads: int, batches: list[int]) -> list[dict[str, Any]]:
    """The rows of ranks of `heads` heads each."""
    weights = Workload(ranks * heads, 1).weights()
    rows = []
    for batch in batches:
        half_bytes = ranks * batch * heads * ROW
        with contextlib.ExitStack() as undo:
            group = VirtualRanks(ranks, half_bytes, TIMEOUT, undo)
            rows.append(measure(group, heads, batch, weights))
        print_row(rows[-1])
    return rows


def print_row(row: dict[str, Any]) -> None:
    shape = f"{row['ranks']:5} {row['heads']:5} {row['batch']:5}"
    if "failure" in row:
        print(shape, row["failure"], flush=True)
        return
    adds, times = row["adds"], row["timings"]
    cells = [f"{name} {value['us']:.2f} ({value['p10']:.2f}-{value['p90']:.2f})"
             for name, value in adds.items()]  # fmt: skip
    verdict = "/".join(row["target"].values())
    print(
        shape,
        *cells,
        f"target {row['target_us']:.2f} {verdict}{host_bound(times)}",
        sep="  ",
        flush=True,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time the gather through mailboxes on a GPU.")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--heads", type=int, nargs="+", default=TIMED_HEADS, help="of each rank")
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--commit", help="commit measured, where the folder is no git checkout")
    parser.add_argument(
        "--output", type=pathlib.Path, help="JSON file; default results/mailbox_GPU.json"
    )
    return parser.parse_args()


def main() -> int:
    """Returns 1 where a call gave up."""
    options = parse()
    # Before the driver starts: streams that share a queue would wait for each other.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    if (found := jax.default_backend()) != "gpu":
        raise SystemExit(f"timing needs an NVIDIA GPU, JAX found {found}. Run `python -m jax_mla`.")
    facts = environment(options.commit)
    print("ranks heads batch  microseconds a call: median (p10-p90)")
    rows = [
        row
        for ranks in options.ranks
        for heads in options.heads
        for row in measure_group(ranks, heads, list(options.batch))
    ]
    write_results(rows, facts, options.output, "mailbox_")
    return int(any("failure" in row for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
