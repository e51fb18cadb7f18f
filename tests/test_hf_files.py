"""Reading a layer's tensors from the files of a checkpoint."""

import builtins
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import DEEPSEEK_V3, Tensors, in_fp8, named, random_tensors, write_checkpoint
from safetensors.numpy import save_file

import jax_mla
from jax_mla import testing, weights


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    return random_tensors(DEEPSEEK_V3)


def test_a_layer_is_read_from_the_files_that_hold_it(tmp_path: Path, tensors: Tensors) -> None:
    """Its tensors lie in two files; FP8 and bf16 come back bit by bit."""
    wanted = in_fp8(tensors)
    whole = named(wanted, "model.layers.12.self_attn.")
    names = sorted(whole)
    other = named(tensors, "model.layers.1.self_attn.")
    extra = {"model.layers.12.self_attn.indexer.wk.weight": np.zeros(3, np.float32)}
    files = {
        "model-00001-of-00002.safetensors": {name: whole[name] for name in names[:5]} | other,
        "model-00002-of-00002.safetensors": {name: whole[name] for name in names[5:]} | extra,
    }
    write_checkpoint(tmp_path, files)
    read = weights.read_layer(tmp_path, 12)
    assert set(read) == set(wanted)
    for name, tensor in wanted.items():
        assert read[name].dtype == tensor.dtype, name
        assert read[name].shape == tensor.shape, name
        assert read[name].tobytes() == tensor.tobytes(), name
    assert weights.read_layer(str(tmp_path), "model.layers.12.self_attn").keys() == wanted.keys()


def test_a_single_file_needs_no_index(tmp_path: Path, tensors: Tensors) -> None:
    save_file(named(tensors, "model.layers.0.self_attn."), tmp_path / "model.safetensors")
    read = weights.read_layer(tmp_path, 0)
    assert read["q_b_proj.weight"].tobytes() == tensors["q_b_proj.weight"].tobytes()


def test_a_layer_with_two_attentions_needs_a_prefix(tmp_path: Path) -> None:
    prefixes = [f"model.layers.3.self_attn.{i}." for i in (0, 1)]
    both = {
        f"{prefix}kv_a_proj_with_mqa.weight": np.full(2, i, np.float32)
        for i, prefix in enumerate(prefixes)
    }
    save_file(both, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="must name one attention, got 3") as caught:
        weights.read_layer(tmp_path, 3)
    assert all(prefix in str(caught.value) for prefix in prefixes)
    read = weights.read_layer(tmp_path, prefixes[1])
    assert read["kv_a_proj_with_mqa.weight"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("names", "layer", "text"),
    [
        (["2.self_attn.kv_a_proj_with_mqa", "7.self_attn.kv_a_proj_with_mqa"], 3, "in 2, 7, got 3"),
        (
            ["2.self_attn.kv_a_proj_with_mqa"],
            "model.layers.3.self_attn",
            "in 2, got 'model.layers.3",
        ),
        (["0.self_attn.k_proj"], 0, "in none, got 0"),
    ],
)
def test_a_layer_that_there_is_not_is_refused(
    tmp_path: Path, names: list[str], layer: Any, text: str
) -> None:
    stored = {f"model.layers.{name}.weight": np.zeros(1, np.float32) for name in names}
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="layer must be one with MLA") as caught:
        weights.read_layer(tmp_path, layer)
    assert text in str(caught.value)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"must hold model\.safetensors\.index\.json or"):
        weights.read_layer(tmp_path, 0)


def test_a_missing_file_of_a_checkpoint_is_named(tmp_path: Path, tensors: Tensors) -> None:
    write_checkpoint(tmp_path, {"a.safetensors": named(tensors, "layers.0.self_attn.")})
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"must hold a\.safetensors, which its index names"):
        weights.read_layer(tmp_path, 0)


def test_reading_says_how_to_install_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").touch()
    imported = builtins.__import__

    def without_safetensors(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "safetensors":
            raise ImportError(name)
        return imported(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_safetensors)
    with pytest.raises(jax_mla.SetupError, match=r"pip install 'jax_mla\[hf\]'"):
        weights.read_layer(tmp_path, 0)


def test_a_made_up_checkpoint_keeps_unit_variance(tmp_path: Path) -> None:
    """A hidden size that fills no block."""
    testing.write_checkpoint(tmp_path, heads=2, hidden=200, seed=1)
    config = json.loads((tmp_path / "config.json").read_text())
    layer = weights.from_hf(weights.read_layer(tmp_path, 0), config)
    for name, columns in (("w_a", 200), ("w_qb", 1536), ("w_uk", 512), ("w_uv", 512), ("w_o", 256)):
        weight = np.asarray(getattr(layer, name)).astype(np.float32)
        assert weight.shape[-1] == columns
        assert weight.std() == pytest.approx(columns**-0.5, rel=0.02), name
    assert layer.w_uk.shape[0] == 2
