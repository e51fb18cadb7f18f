"""The examples and the README's snippet run, and the examples' own checks can fail."""

import importlib.util
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

import jax_mla

ROOT = pathlib.Path(__file__).parents[1]
DECODE_STEP = ROOT / "examples" / "decode_step.py"


def test_the_decode_loop_passes_its_own_check() -> None:
    run = subprocess.run(
        [sys.executable, DECODE_STEP], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.endswith("ok\n")
    assert "implementation: " in run.stdout


@pytest.fixture
def decode_step() -> ModuleType:
    spec = importlib.util.spec_from_file_location("decode_step", DECODE_STEP)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _wrong_scale(q: jax.Array, cache: jax.Array, before: jax.Array) -> tuple[jax.Array, jax.Array]:
    return q, (cache.astype("float32") * 1.1).astype(cache.dtype)


def _heads_swapped(
    q: jax.Array, cache: jax.Array, before: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return q[:, ::-1], cache


def _row_not_written(
    q: jax.Array, cache: jax.Array, before: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return q, before


@pytest.mark.parametrize("corrupt", [_wrong_scale, _heads_swapped, _row_not_written])
def test_the_decode_loop_fails_when_q_absorb_is_wrong(
    decode_step: ModuleType, monkeypatch: pytest.MonkeyPatch, corrupt: Callable[..., Any]
) -> None:
    right = jax_mla.q_absorb

    def wrong(*arguments: Any, **options: Any) -> Any:
        return corrupt(*right(*arguments, **options), before=arguments[5])

    monkeypatch.setattr(jax_mla, "q_absorb", wrong)
    assert decode_step.main(["--steps", "3", "--heads", "2", "--page-size", "2"]) == 1


def test_pages_of_any_size_and_a_single_sequence_decode(decode_step: ModuleType) -> None:
    assert (
        decode_step.main(["--steps", "7", "--heads", "3", "--batch", "1", "--page-size", "3"]) == 0
    )


@pytest.mark.parametrize("option", ["--heads", "--batch", "--steps", "--page-size"])
def test_a_size_below_one_is_refused_by_name(
    decode_step: ModuleType, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        decode_step.main([option, "0"])
    assert caught.value.code == 2
    assert f"argument {option}: must be at least 1, got 0" in capsys.readouterr().err


def test_the_snippet_in_the_readme_runs() -> None:
    [snippet] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(snippet, names)
    q, cache = (np.asarray(names[name], np.float32) for name in ("q", "cache"))
    assert q.shape == (4, 6, 576)
    assert (q != 0).all()
    written = np.flatnonzero((cache != 0).any(axis=-1))
    assert written.tolist() == [3, 70, 511]
