"""Times jax_mla.q_absorb against jax.numpy inside jit, on this machine's GPU.

    python benchmarks/time_q_absorb.py                     # the timed shapes; writes results/*.json
    python benchmarks/time_q_absorb.py --variants all      # every shipped kernel on those shapes
    python benchmarks/time_q_absorb.py --alone             # without the peer, with less dispatch
    python benchmarks/time_q_absorb.py --rope              # with and without RoPE, without the peer
    python benchmarks/time_q_absorb.py --variants small_c8_t1 tiled_c8_t8 --heads 16 --batch 1 2 4

workload.py says what a program is and clock.py how it is timed. All programs are compiled first;
then the programs of one shape are timed in turns.
"""

import argparse
import concurrent.futures
import functools
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import peer
from clock import host_bound, time_in_turns
from environment import environment, write_results
from forced import forced_variant
from shapes import TIMED_BATCHES, TIMED_HEADS
from workload import Chain, Implementation, Workload

import jax_mla
from jax_mla import variants
from jax_mla.rules import KV_RANK, ROW

OURS = functools.partial(jax_mla.q_absorb, implementation="cuda")
ROTATED = ("rope interleaved", "rope half")
POSITIONS = 8192
AGREEMENT = 0.05  # of the norm: XLA may leave out roundings to BF16, which moves e4m3 by a step


def rotated(name: str) -> Implementation:
    """q_absorb with RoPE in the style that `name` ends in, each token somewhere in its context."""
    rope = jax_mla.Rope.default(max_positions=POSITIONS, style=name.removeprefix("rope "))

    def implementation(qkv: jax.Array, *others: jax.Array, **scales: jax.Array) -> Any:
        positions = jnp.arange(len(qkv), dtype=jnp.int32) * 97 % POSITIONS
        return OURS(qkv, *others, **scales, rope=rope.at(positions))

    return implementation


def lowered_programs(
    workloads: list[Workload], keys: list[str], with_rope: bool
) -> Iterator[tuple[tuple[Workload, str], jax.stages.Lowered]]:
    """Every program of the run under (workload, name)."""
    for workload in workloads:
        for key in keys:
            with forced_variant(key):
                lowered = workload.lower(OURS)
            yield (workload, key), lowered
        if not keys:
            yield (workload, "jax_mla"), workload.lower(OURS)
            for name in ROTATED if with_rope else ():
                yield (workload, name), workload.lower(rotated(name))
            if not workload.alone:
                yield (workload, "jnp"), workload.lower(peer.q_absorb)


def compile_all(
    workloads: list[Workload], keys: list[str], with_rope: bool, threads: int
) -> dict[Workload, dict[str, jax.stages.Compiled]]:
    """The compiled programs of each workload by name."""
    compiled: dict[Workload, dict[str, jax.stages.Compiled]] = {w: {} for w in workloads}
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        jobs = {
            name: pool.submit(program.compile)
            for name, program in lowered_programs(workloads, keys, with_rope)
        }
        for (workload, name), job in jobs.items():
            compiled[workload][name] = job.result()
    return compiled


def measure(
    workload: Workload, compiled: dict[str, jax.stages.Compiled], weights: list[Any]
) -> dict[str, Any]:
    """One row of the results: the shape, its floor and a timing for each program."""
    chains = {name: Chain(program, workload, weights) for name, program in compiled.items()}
    timings = time_in_turns({name: chain.program() for name, chain in chains.items()})
    return {
        "heads": workload.heads,
        "batch": workload.batch,
        "layers": workload.layers,
        "floor_us": round(workload.floor_us, 3),
        "variant": variants.choose(workload.batch, workload.heads).key,
        "query_distance": _query_distance(workload, chains),
        "timings": {name: timing.rounded() for name, timing in timings.items()},
    }


def _query_distance(workload: Workload, chains: dict[str, Chain]) -> float:
    """Largest distance of a program's query from the first one's, by its norm; too large raises."""
    compared = KV_RANK if chains.keys() & set(ROTATED) else ROW  # what not all rotate
    queries = (chain.queries[0][..., :compared] for chain in chains.values())
    first, *others = (query.astype(jnp.float32) for query in queries)
    norm = jnp.linalg.norm(first)
    worst = max((float(jnp.linalg.norm(other - first) / norm) for other in others), default=0.0)
    if worst > AGREEMENT:
        raise SystemExit(f"{workload}: the programs' queries are {worst:.1%} apart")
    return round(worst, 6)


def width(name: str) -> int:
    return max(8, len(name))


def print_row(row: dict[str, Any], names: list[str]) -> None:
    times = row["timings"]
    cells = [f"{times[name]['us']:{width(name)}.2f}" for name in names]
    spread = [f"{times[name]['p10']:.2f}-{times[name]['p90']:.2f}" for name in names]
    shape = f"{row['heads']:5} {row['batch']:5} {row['floor_us']:7.2f}"
    print(
        shape,
        *cells,
        f" {row['variant']}  p10-p90 {' '.join(spread)}{host_bound(times)}",
        flush=True,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time jax_mla.q_absorb on a GPU.")
    parser.add_argument("--heads", type=int, nargs="+", default=TIMED_HEADS)
    parser.add_argument("--batch", type=int, nargs="+", default=TIMED_BATCHES)
    parser.add_argument(
        "--variants", nargs="+", default=[], help="time these kernels (or: all), not the peer"
    )
    parser.add_argument("--alone", action="store_true", help="time q_absorb without the peer")
    parser.add_argument("--rope", action="store_true", help="time rotating calls, not the peer")
    parser.add_argument("--commit", help="commit measured, where the folder is no git checkout")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file; default results/GPU.json")
    parser.add_argument("--threads", type=int, default=8, help="programs compiled at a time")
    return parser.parse_args()


def main() -> None:
    options = parse()
    if (found := jax.default_backend()) != "gpu":
        raise SystemExit(f"timing needs an NVIDIA GPU, JAX found {found}. Run `python -m jax_mla`.")
    keys = options.variants
    if keys == ["all"]:
        keys = [variant.key for variant in variants.PLAIN_VARIANTS]
    facts = environment(options.commit)
    alone = options.alone or options.rope or bool(keys)
    workloads = [
        Workload(heads, batch, alone) for heads in options.heads for batch in options.batch
    ]
    compiled = compile_all(workloads, keys, options.rope, options.threads)
    names = keys or ["jax_mla", *(ROTATED if options.rope else ()), *(() if alone else ("jnp",))]
    columns = [f"{name:>{width(name)}}" for name in names]
    print(f"{'heads':>5} {'batch':>5} {'floor':>7}", *columns, " us a layer; the package's choice")
    rows = []
    for heads in options.heads:
        weights = Workload(heads, 1).weights()
        for workload in (w for w in workloads if w.heads == heads):
            rows.append(measure(workload, compiled[workload], weights))
            print_row(rows[-1], names)
    if options.output or not alone:
        write_results(rows, facts, options.output)


if __name__ == "__main__":
    main()
