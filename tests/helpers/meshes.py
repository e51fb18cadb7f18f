"""Meshes of eight CPU devices, inputs whose results are exact, and what a call on a mesh gives."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import AxisType, Mesh

import jax_mla
from jax_mla.testing import make_inputs, oracle

Inputs = dict[str, Any]
Bytes = npt.NDArray[np.uint8]

NAMES = ("dp", "tp", "dcp")
SHAPES = [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2), (1, 2, 4), (1, 4, 2)]
AXES = jax_mla.MeshAxes(batch="dp", heads="tp", dcp="dcp")
SCALES: dict[str, Any] = {"q_scale": 0.25, "k_scale": 0.5}
BATCH, HEADS, PAGES, PAGE_SIZE = 16, 8, 16, 10


def cpu_mesh(shape: tuple[int, ...] = (2, 2, 2), kind: AxisType = AxisType.Auto) -> Mesh:
    devices = jax.devices("cpu")[: int(np.prod(shape))]
    return jax.make_mesh(shape, NAMES, axis_types=(kind,) * 3, devices=devices)


def exact_inputs(*, seed: int = 0) -> Inputs:
    """Arguments for which every sum is exact in float32, so that its order does not matter.

    Latents are +-2**k, so a row's RMS is, and weights are small multiples of a power of two.
    Slots are [B] and name no row.
    """
    rng = np.random.default_rng(seed)

    def multiples(like: Any, unit: float, low: int, high: int) -> Any:
        return (unit * rng.integers(low, high, like.shape)).astype(jnp.bfloat16)

    inputs = {
        name: np.asarray(a)
        for name, a in make_inputs(
            BATCH, HEADS, pages=PAGES, page_size=PAGE_SIZE, seed=seed
        ).items()
    }
    powers = 2.0 ** rng.integers(-2, 3, (BATCH, 1))
    latents = np.where(inputs["qkv"][:, :2048] < 0, -powers, powers).astype(jnp.bfloat16)
    return inputs | {
        "qkv": np.concatenate([latents, inputs["qkv"][:, 2048:]], axis=1),
        "q_norm": multiples(inputs["q_norm"], 1 / 4, 2, 8),
        "kv_norm": multiples(inputs["kv_norm"], 1 / 4, 2, 8),
        "w_qb": multiples(inputs["w_qb"], 1 / 32, -1, 2),
        "w_uk": multiples(inputs["w_uk"], 1 / 8, -1, 2),
        "slots": np.full(BATCH, -1, np.int32),
    }


def mesh_slots(batch_shards: int, ranks: int, *, seed: int = 0) -> npt.NDArray[np.int32]:
    """Slots [D, B]: one rank stores a token, another says -1; some tokens are stored nowhere."""
    rng = np.random.default_rng(seed)
    slots = np.full((ranks, BATCH), -1, np.int32)
    rows = PAGES * PAGE_SIZE // (batch_shards * ranks)
    for tokens in np.split(np.arange(BATCH), batch_shards):
        stored = tokens[: max(1, len(tokens) - 1)]
        own = rng.choice(rows, len(stored), replace=False)
        slots[rng.integers(0, ranks, len(stored)), stored] = own
    return slots


def model(inputs: Inputs, batch_shards: int, ranks: int) -> tuple[Bytes, Bytes]:
    """What q and cache of a whole mesh must be, as bytes, from float64 in NumPy.

    Each batch shard's tokens go into the blocks of pages that its ranks own, in order of ranks.
    """
    query = oracle(inputs | {"slots": [-1] * BATCH}, **SCALES).query
    slots = inputs["slots"].reshape(ranks, batch_shards, -1)
    tokens = np.split(inputs["qkv"], batch_shards)
    blocks = iter(np.split(inputs["cache"], batch_shards * ranks))
    one_head = {"w_qb": inputs["w_qb"][:192], "w_uk": inputs["w_uk"][:1]}
    cache = [
        oracle(
            inputs | one_head | {"qkv": own, "slots": row, "cache": next(blocks)}, **SCALES
        ).cache
        for shard, own in enumerate(tokens)
        for row in slots[:, shard]
    ]
    return query.view(np.uint8), np.concatenate(cache).view(np.uint8)


def bytes_of(array: Any) -> Bytes:
    return np.asarray(array).view(np.uint8)


def assert_same(got: Any, expected: Any) -> None:
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(bytes_of(a), bytes_of(b))


def place(inputs: Inputs, axes: jax_mla.MeshAxes, mesh: Mesh) -> Inputs:
    shardings = axes.shardings(mesh)
    return {name: jax.device_put(a, getattr(shardings, name)) for name, a in inputs.items()}
