"""The examples and the README's snippets run, and the examples' own checks can fail."""

import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_gpu import FakeDriver
from fake_setup import install

import jax_mla
from jax_mla import testing
from jax_mla.dcp import mailbox as mailbox_module

ROOT = pathlib.Path(__file__).parents[1]
EXAMPLES = ["decode_step", "dcp_decode", "deepseek_layer", "export"]
PARTS = ["dcp_layer", "dcp_mailbox"]
"""Files that dcp_decode.py consists of."""


def _run(*arguments: str | pathlib.Path, **environment: str) -> str:
    """What a Python process prints that ends well."""
    run = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    for part in PARTS:  # what a jitted function of an earlier test has traced must not be reused
        sys.modules.pop(part, None)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_run() -> None:
    found = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert found == {*EXAMPLES, *PARTS}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_passes_its_own_check(name: str) -> None:
    assert _run(ROOT / "examples" / f"{name}.py").endswith("ok\n")


@pytest.fixture
def decode_step() -> ModuleType:
    return _load("decode_step")


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


LAYER_OPTIONS = ["--steps", "6", "--heads", "2", "--batch", "2", "--page-size", "4"]


@pytest.fixture
def deepseek_layer() -> ModuleType:
    return _load("deepseek_layer")


def test_a_checkpoint_that_is_given_decodes(
    deepseek_layer: ModuleType, tmp_path: pathlib.Path
) -> None:
    testing.write_checkpoint(tmp_path, heads=3, hidden=192)
    checkpoint = ["--checkpoint", str(tmp_path), "--layer", "0"]
    assert deepseek_layer.main([*LAYER_OPTIONS, *checkpoint]) == 0


def test_a_configuration_of_a_newer_spelling_decodes(
    deepseek_layer: ModuleType, tmp_path: pathlib.Path
) -> None:
    testing.write_checkpoint(tmp_path, heads=2, hidden=192)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = {"rope_theta": config.pop("rope_theta"), **config.pop("rope_scaling")}
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    assert deepseek_layer.main([*LAYER_OPTIONS, "--checkpoint", str(tmp_path)]) == 0


def test_a_checkpoint_of_another_family_is_refused(
    deepseek_layer: ModuleType, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "longcat_flash"}')
    with pytest.raises(SystemExit, match=r"model_type must be one of .*, got longcat_flash"):
        deepseek_layer.main(["--checkpoint", str(tmp_path)])


def _without_rope(**options: Any) -> dict[str, Any]:
    return options | {"rope": None}


def _another_style(**options: Any) -> dict[str, Any]:
    rope = options["rope"]
    return options | {"rope": jax_mla.Rope(rope.cos_sin, rope.positions, style="half")}


def _one_position(**options: Any) -> dict[str, Any]:
    return options | {"rope": options["rope"].at(jnp.full_like(options["rope"].positions, 3))}


@pytest.mark.parametrize("corrupt", [_without_rope, _another_style, _one_position])
def test_decoding_fails_when_positions_rotate_wrongly(
    deepseek_layer: ModuleType, monkeypatch: pytest.MonkeyPatch, corrupt: Callable[..., Any]
) -> None:
    right: Any = jax_mla.q_absorb

    def wrong(*arguments: Any, **options: Any) -> Any:
        return right(*arguments, **(corrupt(**options) if "rope" in options else options))

    monkeypatch.setattr(jax_mla, "q_absorb", wrong)
    assert deepseek_layer.main(LAYER_OPTIONS) == 1


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda layer: {"softmax_scale": 192**-0.5},
        lambda layer: {"w_uk": layer.w_uv},
        lambda layer: {"w_qb": layer.w_qb[::-1]},
        lambda layer: {"w_o": layer.w_o * jnp.bfloat16(1.125)},
    ],
    ids=["no mscale", "halves swapped", "rows reversed", "scaled"],
)
def test_decoding_fails_when_weights_are_wrong(
    deepseek_layer: ModuleType, monkeypatch: pytest.MonkeyPatch, corrupt: Callable[..., Any]
) -> None:
    right = jax_mla.weights.from_hf

    def wrong(*arguments: Any, **options: Any) -> Any:
        layer = right(*arguments, **options)
        return dataclasses.replace(layer, **corrupt(layer))

    monkeypatch.setattr(jax_mla.weights, "from_hf", wrong)
    assert deepseek_layer.main(LAYER_OPTIONS) == 1


MESH_OPTIONS = ["--mesh", "1", "2", "4", "--heads", "1", "--prefill", "20", "--steps", "2"]


def _on_mesh_only(
    corrupt: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
) -> tuple[ModuleType, str, Callable[..., Any]]:
    right = jax_mla.q_absorb

    def wrong(*arguments: Any, **options: Any) -> Any:
        q, cache = right(*arguments, **options)
        return corrupt(q, cache, arguments[5]) if "axes" in options else (q, cache)

    return jax_mla, "q_absorb", wrong


def _rank_0_only(outs: jax.Array, lses: jax.Array, axis: str) -> tuple[jax.Array, jax.Array]:
    own = lses + jnp.where(jax.lax.axis_index(axis) == 0, 0, -jnp.inf)
    return _MERGE(outs, own, axis)


def _always_interleave_1(tables: Any, positions: Any, page_size: int, dcp: int, _: int = 1) -> Any:
    return _LOCAL_SLOTS(tables, positions, page_size, dcp)


_MERGE, _LOCAL_SLOTS = jax_mla.dcp.merge, jax_mla.dcp.local_slots


@pytest.mark.parametrize(
    ("module", "name", "wrong"),
    [
        _on_mesh_only(_heads_swapped),
        _on_mesh_only(_row_not_written),
        (jax_mla.dcp, "merge", _rank_0_only),
        (jax_mla.dcp, "local_slots", _always_interleave_1),
    ],
    ids=["heads", "rows", "merge", "slots"],
)
def test_decoding_on_a_mesh_fails_when_a_part_is_wrong(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, wrong: Callable[..., Any]
) -> None:
    monkeypatch.setattr(module, name, wrong)
    assert _load("dcp_decode").main([*MESH_OPTIONS, "--interleave", "4"]) == 1


def test_a_mailbox_without_a_gpu_is_refused() -> None:
    run = subprocess.run(
        [sys.executable, ROOT / "examples" / "dcp_decode.py", "--mailbox"],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 1
    assert run.stderr.startswith("--mailbox needs an NVIDIA GPU, got none: ")


@pytest.mark.parametrize(
    ("corrupt", "agrees"), [("nothing", True), ("merge", False), ("process 1", False)]
)
def test_two_processes_that_merge_on_cpus_agree_unless_one_is_wrong(
    corrupt: str, agrees: bool
) -> None:
    """With CPUs instead of a shared GPU, and a collective instead of a mailbox."""
    program = ROOT / "tests" / "programs" / "mailbox_example.py"
    printed = _run(program, corrupt, PYTHONPATH=str(ROOT / "examples"))
    assert printed.endswith(f"agrees: {agrees}\n")
    for process in range(2):
        assert printed.count(f"process {process}, interleave") == 2


COLLECTIVE = re.compile(
    r"\b(all.gather|all.reduce|all.to.all|collective.\w+|reduce.scatter)(?:-start)?\"?\("
)


def _program(function: str, mailbox: bool, text_of: Callable[[Any], str]) -> str:
    """Text of a function of dcp_decode on 2 CPU devices, from what jax.jit traced."""
    example = _load("dcp_decode")
    options = example.parse(["--mesh", "1", "1", "2"])
    work, devices = example.random_work(options), jax.devices("cpu")[:2]
    mesh = jax.make_mesh(options.mesh, example.NAMES, devices=devices)
    box = jax_mla.DcpMailbox(mesh, "dcp", max_batch=2, heads=2) if mailbox else None
    layer = example.OnMesh(work.layer, mesh, work.pages, 16, interleave=16, mailbox=box)
    program = layer._jit(getattr(sys.modules["dcp_layer"], function))

    def text(*arguments: Any, **options: Any) -> str:
        return text_of(program.trace(*arguments, **options))

    return str(layer._call(text, work.tokens[0], work.tables, work.prefix_lengths))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="lowering looks at the process's GPUs")
def test_with_a_mailbox_only_the_merge_is_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeDriver(2))
    monkeypatch.setattr(mailbox_module, "check_devices", lambda groups, process: None)

    def lowered(traced: Any) -> str:
        return str(traced.lower(lowering_platforms=("cuda",)).as_text())

    for function, collectives in (
        ("store", []),
        ("attend_by_rank", []),
        ("decode_step", ["all_to_all"] * 2),
    ):
        text = _program(function, True, lowered)
        assert COLLECTIVE.findall(text) == collectives, function
        assert text.count("custom_call @jax_mla_exchange(") == 1


@pytest.mark.parametrize("function", ["store", "attend_by_rank"])
def test_the_partitioner_adds_no_collective(function: str) -> None:
    """Without a mailbox the one of q_absorb is left."""
    text = _program(function, False, lambda traced: str(traced.lower().compile().as_text()))
    assert COLLECTIVE.findall(text) == ["all-gather"]


def test_an_export_without_the_kernel_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = functools.partial(jax_mla.q_absorb, implementation="reference")
    monkeypatch.setattr(jax_mla, "q_absorb", reference)
    assert _load("export").main([]) == 1


def _snippet(heading: str) -> str:
    section = (ROOT / "README.md").read_text().split(f"\n## {heading}\n")[1]
    [snippet] = re.findall(r"```python\n(.*?)```", section.split("\n## ")[0], re.DOTALL)
    return str(snippet)


def test_the_snippet_in_the_readme_runs() -> None:
    names: dict[str, Any] = {}
    exec(_snippet("Use"), names)
    q, cache = (np.asarray(names[name], np.float32) for name in ("q", "cache"))
    assert q.shape == (4, 6, 576)
    assert (q != 0).all()
    written = np.flatnonzero((cache != 0).any(axis=-1))
    assert written.tolist() == [3, 70, 511]


def test_the_snippet_for_a_mesh_runs() -> None:
    """A process of its own, since it says how many devices there are."""
    show = """
import numpy as np
print(q.shape, q.sharding.is_equivalent_to(at.q, 3), (np.asarray(q, np.float32) != 0).all())
print(np.flatnonzero((np.asarray(cache, np.float32) != 0).any(axis=-1)).tolist())
"""
    printed = _run("-c", _snippet("On a mesh") + show, JAX_PLATFORMS="cpu").splitlines()
    assert printed[0] == "(4, 16, 576) True True"
    # Positions 0 and 1 lie on ranks 0 and 1 of shard 0, position 130 on rank 0 of shard 1, each of
    # which has 8 pages of 64 rows.
    assert printed[1] == str([0, (8 + 1) * 64, (16 + 5) * 64 + 1])
