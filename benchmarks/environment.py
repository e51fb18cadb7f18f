"""Where a measurement was made: enough to repeat it."""

import datetime
import importlib.resources
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import jax

import jax_mla

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CLOCKS = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")


def gpu_query(*fields: str) -> dict[str, str]:
    """What nvidia-smi says of the first device's `fields`; it only reads."""
    ordinal = jax.local_devices()[0].local_hardware_id
    command = ["nvidia-smi", f"--id={ordinal}", f"--query-gpu={','.join(fields)}"]
    try:
        answer = subprocess.run(
            [*command, "--format=csv,noheader"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except FileNotFoundError:
        raise SystemExit(
            "nvidia-smi was not found, results need its clocks. Install it: the driver has it."
        ) from None
    return dict(zip(fields, answer.split(", "), strict=True))


def write_results(
    rows: list[dict[str, Any]],
    facts: Mapping[str, object],
    output: pathlib.Path | None,
    prefix: str = "",
) -> None:
    """Writes rows and what `environment` said before them; by default to results/ by GPU."""
    if output is None:
        gpu = re.sub(r"\W+", "_", str(facts["gpu"])).lower()
        output = RESULTS / f"{prefix}{gpu}.json"
    content = {"environment": {**facts, "clocks_after": clocks()}, "rows": rows}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(content, indent=1) + "\n")
    print("wrote", output)


def clocks() -> dict[str, str]:
    return gpu_query(*CLOCKS)


def environment(commit: str | None) -> dict[str, object]:
    """The machine, its clocks now, the software and the command line.

    Args:
        commit: the commit measured; None asks git.
    """
    gpu = gpu_query("name", "driver_version")
    manifest = importlib.resources.files("jax_mla") / "cubins" / "manifest.json"
    return {
        "gpu": gpu["name"],
        "driver": gpu["driver_version"],
        "jax": jax.__version__,
        "jax_mla": jax_mla.__version__,
        "kernels": json.loads(manifest.read_text())["source_hash"],
        "commit": commit or _commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "command": " ".join(["python", *sys.argv]),
        "clocks_before": clocks(),
    }


def _commit() -> str:
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if described.returncode:
        raise SystemExit("this folder is no git checkout: name the commit with --commit")
    return described.stdout.strip()
