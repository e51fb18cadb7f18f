"""Reads the attention tensors of one layer from a Hugging Face checkpoint."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jax_mla.errors import SetupError

Tensor = npt.NDArray[Any]

PROJECTIONS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
NORMS = ("q_a_layernorm", "kv_a_layernorm")
TENSORS = frozenset(
    [f"{name}.weight" for name in PROJECTIONS + NORMS]
    + [f"{name}.weight_scale_inv" for name in PROJECTIONS]
)
"""Names within a layer; a projection in FP8 has a scale for each block of its weight."""

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"

_KV_A_PROJ = re.compile(
    r"((?:.*\.)?layers\.(\d+)\.self_attn\.(?:\d+\.)?)kv_a_proj_with_mqa\.weight"
)
"""The name of a tensor that every MLA layer has, its prefix and the number of the layer."""

# As safetensors names them: it looks for their dtypes in NumPy, which has none.
_FLOAT8 = {"F8_E4M3": jnp.float8_e4m3fn, "F8_E8M0": jnp.float8_e8m0fnu}


def read_layer(folder: str | Path, layer: int | str) -> dict[str, Tensor]:
    """Returns the attention tensors of one layer, as they are stored.

    Args:
        folder: of a checkpoint, with model.safetensors.index.json and the files that it names, or
            with a single model.safetensors.
        layer: the number of the layer, or the whole prefix of its tensors' names where the number
            does not tell: "model.layers.3.self_attn.1" for LongCat, which has two attentions a
            layer.

    Returns:
        NumPy arrays by their names within the layer, as `from_hf` takes them. Other tensors of the
        layer are not read.

    Raises:
        FileNotFoundError: a file of the checkpoint is missing.
        ValueError: the checkpoint has no such layer, or several.
        jax_mla.SetupError: the package safetensors is not installed.
    """
    files = _files(Path(folder))
    prefix = _prefix(files, layer)
    wanted = [name for name in files if name.removeprefix(prefix) in TENSORS]
    tensors = {}
    for path in sorted({files[name] for name in wanted}):
        for name, tensor in _read(path, [name for name in wanted if files[name] == path]):
            tensors[name.removeprefix(prefix)] = tensor
    return tensors


def _files(folder: Path) -> dict[str, Path]:
    """Returns the file of each tensor of a checkpoint."""
    if (folder / _INDEX).is_file():
        index = json.loads((folder / _INDEX).read_text())
        return {name: folder / file for name, file in index["weight_map"].items()}
    path = folder / _SINGLE
    if not path.is_file():
        raise FileNotFoundError(
            f"folder must hold {_INDEX} or {_SINGLE}, got {folder} without them."
            " Pass the folder of a Hugging Face checkpoint."
        )
    with _opened(path) as opened:
        return dict.fromkeys(opened.keys(), path)


def _prefix(names: Mapping[str, Path], layer: int | str) -> str:
    matches = [match for name in names if (match := _KV_A_PROJ.fullmatch(name))]
    prefixes = {match[1]: int(match[2]) for match in matches}
    if isinstance(layer, str):
        found = [prefix for prefix in prefixes if prefix.rstrip(".") == layer.rstrip(".")]
    else:
        found = [prefix for prefix, number in prefixes.items() if number == layer]
    if len(found) > 1:
        raise ValueError(
            f"layer must name one attention, got {layer}, which has {', '.join(sorted(found))}."
            " Pass one of these."
        )
    if not found:
        numbers = sorted(set(prefixes.values()))
        listed = ", ".join(map(str, numbers)) or "none"  # not all layers need have MLA
        raise ValueError(
            f"layer must be one with MLA, which this checkpoint has in {listed}, got {layer!r}."
            " Pass its number, or the prefix of its tensors' names."
        )
    return found[0]


def _read(path: Path, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    if not path.is_file():
        raise FileNotFoundError(
            f"folder must hold {path.name}, which its index names for {names[0]}, got"
            f" {path.parent} without it. Fetch the file."
        )
    with _opened(path) as opened:
        for name in names:
            stored = opened.get_slice(name)
            float8 = _FLOAT8.get(stored.get_dtype())
            if float8 is None:
                yield name, opened.get_tensor(name)
            else:
                yield name, _bytes_of(path, name).view(float8).reshape(stored.get_shape())


def _bytes_of(path: Path, name: str) -> npt.NDArray[np.uint8]:
    """Returns a tensor's bytes, which lie where the header, 8 bytes of length and a JSON, says."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        start, end = json.loads(file.read(header_bytes))[name]["data_offsets"]
        file.seek(8 + header_bytes + start)
        return np.frombuffer(file.read(end - start), np.uint8)


def _opened(path: Path) -> Any:
    try:
        from safetensors import safe_open
    except ImportError:
        raise SetupError(
            "Reading a checkpoint needs the package safetensors, which is not installed."
            " Run `pip install 'jax_mla[hf]'`."
        ) from None
    return safe_open(path, framework="np")
