"""Writes README.md's tables: speed from benchmarks/results/*.json, models from what is shipped.

python benchmarks/tables.py            # rewrites the parts between the markers
python benchmarks/tables.py --check    # exits 1 when README.md is stale
"""

import argparse
import json
import pathlib
from typing import Any

import support
from environment import RESULTS, ROOT

README = ROOT / "README.md"
HEADER = (
    "heads",
    "B",
    "floor",
    "jnp in jit",
    "jax_mla",
    "p10 to p90",
    "times faster",
    "share of floor",
    "kernel",
)
MAILBOX_HEADER = (
    "ranks",
    "heads a rank",
    "B",
    "target",
    "exchange alone",
    "beside q_absorb",
    "all heads instead",
    "verdict",
)


def speed_files(results: pathlib.Path) -> list[pathlib.Path]:
    """The results of time_q_absorb.py in a folder."""
    return sorted(set(results.glob("*.json")) - set(mailbox_files(results)))


def mailbox_files(results: pathlib.Path) -> list[pathlib.Path]:
    """The results of time_mailbox.py in a folder."""
    return sorted(results.glob("mailbox_*.json"))


def tables(results: pathlib.Path) -> str:
    """One Markdown table for each results file, each under a line that says where it was made."""
    parts = [
        *(_table(json.loads(file.read_text()), file.name) for file in speed_files(results)),
        *(_mailbox_table(json.loads(file.read_text()), file.name)
          for file in mailbox_files(results)),
    ]  # fmt: skip
    return "\n\n".join(parts) if parts else "No results are committed yet."


def _made(facts: dict[str, Any], name: str) -> str:
    """Where a results file was made."""
    return (
        f"{facts['gpu']}, driver {facts['driver']}, jax {facts['jax']}, jax_mla"
        f" {facts['jax_mla']} ({facts['commit']}), {facts['date']}, SM clock"
        f" {facts['clocks_before']['clocks.sm']} before and {facts['clocks_after']['clocks.sm']}"
        f" after ([{name}](benchmarks/results/{name}))."
    )


def _table(results: dict[str, Any], name: str) -> str:
    title = f"{_made(results['environment'], name)} Microseconds a layer:"
    lines = [_line(HEADER), _line(["---:"] * (len(HEADER) - 1) + ["---"])]
    return "\n".join([title, "", *lines, *(_line(_cells(row)) for row in results["rows"])])


def _cells(row: dict[str, Any]) -> list[str]:
    ours, peer = row["timings"]["jax_mla"], row["timings"]["jnp"]
    return [
        str(row["heads"]),
        str(row["batch"]),
        f"{row['floor_us']:.1f}",
        f"{peer['us']:.1f}",
        f"{ours['us']:.1f}",
        f"{ours['p10']:.1f} to {ours['p90']:.1f}",
        f"{peer['us'] / ours['us']:.1f}",
        f"{row['floor_us'] / ours['us']:.0%}",
        f"`{row['variant']}`",
    ]


def _mailbox_table(results: dict[str, Any], name: str) -> str:
    title = (
        f"{_made(results['environment'], name)} Measured by `python benchmarks/time_mailbox.py`,"
        " whose docstring says what these are not: microseconds that the gather through mailboxes"
        " adds to a call where all ranks share this GPU, p10 to p90 in brackets, and what a rank"
        " pays that has the heads of all ranks instead:"
    )
    lines = [_line(MAILBOX_HEADER), _line(["---:"] * (len(MAILBOX_HEADER) - 1) + ["---"])]
    return "\n".join([title, "", *lines, *(_line(_mailbox_cells(row)) for row in results["rows"])])


def _mailbox_cells(row: dict[str, Any]) -> list[str]:
    shape = [str(row[name]) for name in ("ranks", "heads", "batch")]
    if "failure" in row:
        return [*shape, *["-"] * 4, "gave up"]
    times = [
        f"{added['us']:.1f} ({added['p10']:.1f} to {added['p90']:.1f})"
        for added in row["adds"].values()
    ]
    verdicts = [f"{verdict} {name}" for name, verdict in row["target"].items()]
    return [*shape, f"{row['target_us']:.1f}", *times, ", ".join(verdicts)]


def _line(cells: list[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def with_tables(readme: str) -> str:
    """The README's text with its tables made anew."""
    return with_part(with_part(readme, "speed", tables(RESULTS)), "models", support.table())


def with_part(readme: str, part: str, generated: str) -> str:
    """The README's text with `generated` between the markers of a part.

    Raises:
        ValueError: the text does not hold each marker once, in order.
    """
    opening = f"<!-- {part}: begin, written by benchmarks/tables.py -->"
    closing = f"<!-- {part}: end -->"
    before, begin, rest = readme.partition(opening)
    old, end, after = rest.partition(closing)
    if not (begin and end) or opening in old + after or closing in after:
        raise ValueError(f"README.md must hold {opening!r} and then {closing!r}, once each.")
    return f"{before}{opening}\n\n{generated}\n\n{closing}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write README.md's tables.")
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 on a difference")
    check = parser.parse_args().check
    written = README.read_text()
    wanted = with_tables(written)
    if check:
        stale = written != wanted
        print("README.md is stale: run python benchmarks/tables.py" if stale else "up to date")
        return int(stale)
    README.write_text(wanted)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
