"""Looks up, checks and dequantises the attention tensors of one layer."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_mla.hf_files import TENSORS, Tensor

FLOAT8 = "float8_e4m3fn"
WIDE = ("bfloat16", "float16", "float32")

_SHOWN = 8


class LayerTensors:
    """The tensors of one layer by their names in it, whatever their prefix.

    Args:
        tensors: arrays by name.
        block: rows and columns of an FP8 weight that share a scale.

    Raises:
        ValueError: a name occurs with several prefixes.
    """

    def __init__(self, tensors: Mapping[str, Any], block: tuple[int, int]) -> None:
        self._tensors = tensors
        self._block = block
        self._full_names: dict[str, str] = {}
        for full_name in tensors:
            name = ".".join(full_name.rsplit(".", 2)[-2:])
            if name not in TENSORS:
                continue
            if name in self._full_names:
                raise ValueError(
                    f"layer_tensors must hold {name} once, got {self._full_names[name]} and"
                    f" {full_name}. Pass the tensors of one attention layer."
                )
            self._full_names[name] = full_name

    def __contains__(self, name: str) -> bool:
        return name in self._full_names

    def projection(self, name: str, rows: int, columns: int) -> Tensor:
        """Returns a projection's weight [rows, columns] in bf16, FP8 ones times their scales.

        Raises:
            ValueError: it or its scales are missing, or have the wrong shape.
            TypeError: it has another dtype than FP8, BF16, FP16 and FP32.
        """
        weight = self._array(f"{name}.weight", [rows, columns], (FLOAT8, *WIDE))
        scale_name = f"{name}.weight_scale_inv"
        if (weight.dtype == FLOAT8) != (scale_name in self):
            held = "with" if scale_name in self else "without"
            raise ValueError(
                f"{name}.weight must be {FLOAT8} with {scale_name}, or of another dtype without,"
                f" got {weight.dtype} {held} it. Pass the tensors as the checkpoint has them."
            )
        if weight.dtype != FLOAT8:
            return weight.astype(jnp.bfloat16)
        shape = [-(-size // block) for size, block in zip(weight.shape, self._block, strict=True)]
        scales = self._array(scale_name, shape, ("float8_e8m0fnu", *WIDE))
        return dequantized(weight, scales, self._block)

    def norm(self, name: str, columns: int, factor: float) -> Tensor:
        """Returns a norm's weight [columns] times a factor, in bf16.

        Raises:
            ValueError: it is missing or has the wrong shape.
            TypeError: it has another dtype than BF16, FP16 and FP32.
        """
        weight = self._array(f"{name}.weight", [columns], WIDE)
        return (weight.astype(np.float32) * np.float32(factor)).astype(jnp.bfloat16)

    def _array(self, name: str, shape: list[int], dtypes: tuple[str, ...]) -> Tensor:
        if name not in self:
            found = sorted(self._tensors)
            listed = ", ".join(found[:_SHOWN]) + (", ..." if len(found) > _SHOWN else "")
            raise ValueError(
                f"layer_tensors must hold {name}, got {listed or 'nothing'}."
                " Pass all attention tensors of the layer, as jax_mla.weights.read_layer does."
            )
        value = self._tensors[self._full_names[name]]
        dtype = getattr(value, "dtype", type(value).__name__)
        dtype_name = getattr(dtype, "name", dtype)  # other libraries' dtypes have no name
        if dtype_name not in dtypes:
            raise TypeError(
                f"{name} must be a NumPy or JAX array of {', '.join(dtypes)}, got {dtype_name}."
                " Read it with jax_mla.weights.read_layer, or convert it."
            )
        if list(value.shape) != shape:
            raise ValueError(
                f"{name} must be {shape} by the config's sizes, got {list(value.shape)}."
                " Pass the config.json of the same checkpoint, and whole tensors."
            )
        return np.asarray(value)


def dequantized(weight: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Returns the weight with each block times its scale, in FP32, rounded to bf16.

    As in DeepSeek-V3's inference/kernel.py (weight_dequant).

    Args:
        weight: [N, K] e4m3.
        scales: [ceil(N / rows), ceil(K / columns)], any floating-point dtype.
        block: rows, columns.
    """
    rows, columns = block
    result = np.empty(weight.shape, jnp.bfloat16)
    # A band of blocks at a time: in FP32 the whole would take four times the memory of the FP8.
    for band, scales_of_band in enumerate(scales.astype(np.float32)):
        scale = np.repeat(scales_of_band, columns)[: weight.shape[1]]
        of_band = slice(band * rows, (band + 1) * rows)
        result[of_band] = (weight[of_band].astype(np.float32) * scale).astype(jnp.bfloat16)
    return result
