"""Draws docs/speed.svg from the results of time_q_absorb.py, one row of panels for each file.

pip install '.[bench]' && python benchmarks/plot.py

The same results and the same matplotlib give the same bytes.
"""

import hashlib
import json
import pathlib
from typing import Any

from environment import RESULTS, ROOT
from tables import speed_files

PICTURE = ROOT / "docs" / "speed.svg"
LINES: dict[str, dict[str, Any]] = {
    "jnp in jit": {"color": "#d55e00", "marker": "s", "markersize": 4},
    "jax_mla": {"color": "#0072b2", "marker": "o", "markersize": 5},
    "floor": {"color": "#555555", "linewidth": 0.8},
}
STYLE = {"svg.hashsalt": "jax_mla", "svg.fonttype": "none", "font.size": 10}


def series(results: dict[str, Any]) -> dict[int, dict[str, dict[int, float]]]:
    """Microseconds a layer by head count, line and batch."""
    panels: dict[int, dict[str, dict[int, float]]] = {}
    for row in results["rows"]:
        lines = panels.setdefault(row["heads"], {name: {} for name in LINES})
        lines["jnp in jit"][row["batch"]] = row["timings"]["jnp"]["us"]
        lines["jax_mla"][row["batch"]] = row["timings"]["jax_mla"]["us"]
        lines["floor"][row["batch"]] = row["floor_us"]
    return panels


def source(results: pathlib.Path) -> str:
    """What the picture says it was drawn from: a hash of each results file."""
    files = speed_files(results)
    return ", ".join(f"{f.name} sha256 {hashlib.sha256(f.read_bytes()).hexdigest()}" for f in files)


def draw(results: pathlib.Path, picture: pathlib.Path) -> None:
    """Writes the picture of every results file in the folder `results`."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise SystemExit("drawing needs matplotlib: pip install '.[bench]'") from None
    files = speed_files(results)
    if not files:
        raise SystemExit(f"{results} holds no results: run python benchmarks/time_q_absorb.py")
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.5, 3.4 * len(files)), layout="constrained")
        rows = figure.subfigures(len(files), squeeze=False)[:, 0]
        for row, file in zip(rows, files, strict=True):
            _draw_row(row, json.loads(file.read_text()))
        metadata = {"Date": None, "Creator": None, "Source": source(results)}
        figure.savefig(picture, format="svg", metadata=metadata)


def _draw_row(figure: Any, results: dict[str, Any]) -> None:
    panels, facts = series(results), results["environment"]
    figure.suptitle(f"{facts['gpu']}, jax {facts['jax']}: microseconds a layer over batch")
    every_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (heads, lines) in zip(every_axes, panels.items(), strict=True):
        for name, times in lines.items():
            axes.plot(times.keys(), times.values(), label=name, **LINES[name])
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(lines["jax_mla"]), labels=[str(batch) for batch in lines["jax_mla"]])
        axes.set_title(f"{heads} heads", fontsize="medium")
        axes.set_xlabel("B, tokens")
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    every_axes[0].set_ylim(bottom=0)  # only now: it ends autoscaling, and the panels share the axis
    every_axes[0].set_ylabel("µs a layer")
    handles, names = every_axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)


if __name__ == "__main__":
    draw(RESULTS, PICTURE)
    print("wrote", PICTURE)
