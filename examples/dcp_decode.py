"""Decoding on a mesh, data x tensor x decode-context parallel, checked against one device.

dcp_layer.py is the step: sequences are split over "data", heads over "tensor" and "dcp", and the
cache over "data" and "dcp". Some positions are prefilled, then a few are decoded, with 1 and with
16 consecutive positions on a rank. One device does the same with a cache that is not split. Queries
and cache must have the same bytes and outputs may differ by FP32 rounding; otherwise the exit
status is 1.

    python examples/dcp_decode.py                   # 8 GPUs, or 8 made-up CPU devices
    python examples/dcp_decode.py --mesh 1 1 2      # data, tensor, dcp: 2 devices
    python examples/dcp_decode.py --mailbox         # 8 GPUs, or one that two processes share

With --mailbox, dcp_mailbox.py does the same with queries gathered through a `jax_mla.DcpMailbox`.
"""

import argparse
import dataclasses
import functools
import math
import sys
from collections.abc import Sequence
from typing import Any

import dcp_mailbox
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from dcp_layer import (
    COLUMNS,
    HEAD_ROWS,
    KV_RANK,
    NAMES,
    NOPE,
    Q_RANK,
    ROW,
    VALUE,
    Ints,
    Layer,
    OnMesh,
    attend,
    empty_cache,
    q_absorb,
    unabsorb,
)

import jax_mla
from jax_mla import dcp

Bytes = npt.NDArray[np.uint8]

TOLERANCE = 1e-5  # of the outputs' norm: FP32 sums over shards instead of over everything


class OnOneDevice:
    """The layer on one device of a mesh, with pages that hold what a whole group's do.

    q_absorb is called for the tokens and heads of one rank at a time: for another size it may
    choose another kernel, which sums in another order.
    """

    def __init__(self, layer: Layer, mesh: jax.sharding.Mesh, pages: int, page_size: int) -> None:
        groups = mesh.shape["tensor"] * mesh.shape["dcp"]
        by_rank = (np.split(weight, groups) for weight in (layer.w_qb, layer.w_uk))
        put = functools.partial(jax.device_put, device=mesh.local_devices[0])
        self._by_rank = [
            put(dataclasses.replace(layer, w_qb=w_qb, w_uk=w_uk))
            for w_qb, w_uk in zip(*by_rank, strict=True)
        ]
        self._w_uv = put(layer.w_uv)
        self._data, self._pages = mesh.shape["data"], pages
        self.cache = put(empty_cache(self._data * pages, page_size * mesh.shape["dcp"]))

    def store(self, qkv: Any, tables: Ints, positions: Ints) -> Any:
        shards = (np.split(x, self._data) for x in (qkv, self._in_one_cache(tables), positions))
        return np.concatenate([self._store_shard(*shard) for shard in zip(*shards, strict=True)])

    def step(self, qkv: Any, tables: Ints, positions: Ints) -> tuple[Any, Any]:
        q = self.store(qkv, tables, positions)
        return attend_whole(self._w_uv, q, self.cache, self._in_one_cache(tables), positions), q

    def to_host(self, x: Any) -> npt.NDArray[Any]:
        return np.asarray(x)

    def _store_shard(self, qkv: Any, tables: Ints, positions: Ints) -> Any:
        heads = []
        for layer in self._by_rank:
            q, self.cache = store_whole(layer, qkv, self.cache, tables, positions)
            heads.append(np.asarray(q))
        return np.concatenate(heads, axis=1)

    def _in_one_cache(self, tables: Ints) -> Ints:
        """Tables count pages within a data shard; here the pages of all shards lie in a row."""
        shard: Ints = np.arange(len(tables), dtype=np.int32) * self._data // len(tables)
        return tables + shard[:, None] * self._pages


@functools.partial(jax.jit, donate_argnames="cache")
def store_whole(layer: Layer, qkv: Any, cache: Any, tables: Any, positions: Any) -> Any:
    [slots] = dcp.local_slots(tables, positions, cache.shape[1], dcp=1)
    return q_absorb(layer, qkv, cache, slots)


@jax.jit
def attend_whole(w_uv: Any, q: Any, cache: Any, tables: Any, positions: Any) -> jax.Array:
    latents, _ = attend(q, cache, tables, positions + 1)
    return unabsorb(latents, w_uv)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What is decoded, in NumPy arrays."""

    layer: Layer
    pages: int  # on each rank
    tables: Ints  # [B, N], pages counted within a data shard
    prefix: Any  # [B, T, 2112] bf16
    prefix_lengths: Ints  # [B], 0 to T
    tokens: Any  # [steps, B, 2112] bf16


def random_work(options: argparse.Namespace) -> Work:
    """Work of unit variance; one sequence starts empty, so most ranks hold nothing of it."""
    data, tensor, ranks = options.mesh
    heads, batch = options.heads * tensor * ranks, options.batch * data
    rng = np.random.default_rng(options.seed)

    def normal(*shape: int, mean: float = 0.0, deviation: float = 1.0) -> Any:
        values = mean + deviation * rng.standard_normal(shape, np.float32)
        return values.astype(jnp.bfloat16)

    pages_each = -(-(options.prefill + options.steps) // (options.page_size * ranks))
    pages = options.batch * pages_each
    tables = np.concatenate([rng.permutation(pages) for _ in range(data)])
    lengths = rng.integers(0, options.prefill, batch, np.int32, endpoint=True)
    lengths[0] = 0
    return Work(
        layer=Layer(
            q_norm=normal(Q_RANK, mean=1.0, deviation=0.1),
            kv_norm=normal(KV_RANK, mean=1.0, deviation=0.1),
            w_qb=normal(heads * HEAD_ROWS, Q_RANK, deviation=Q_RANK**-0.5),
            w_uk=normal(heads, NOPE, KV_RANK, deviation=NOPE**-0.5),
            w_uv=normal(heads, VALUE, KV_RANK, deviation=KV_RANK**-0.5),
        ),
        pages=pages,
        tables=tables.reshape(batch, pages_each).astype(np.int32),
        prefix=normal(batch, options.prefill, COLUMNS),
        prefix_lengths=lengths,
        tokens=normal(options.steps, batch, COLUMNS),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What a run produced."""

    outputs: npt.NDArray[np.float32]  # [steps, B, H, 128]
    queries: Bytes  # [steps, B, H, 576]
    cache: Bytes  # [pages, rows, 576], all pages of all ranks


def decode(layer: OnMesh | OnOneDevice, work: Work) -> Result:
    """Prefills all prefixes in one call, padded at their ends, and decodes token by token."""
    length = work.prefix.shape[1]
    places = np.arange(length, dtype=np.int32)
    positions = np.where(places < work.prefix_lengths[:, None], places, np.int32(-1))
    layer.store(
        work.prefix.reshape(-1, COLUMNS),
        np.repeat(work.tables, length, axis=0),
        positions.reshape(-1),
    )
    outputs, queries = [], []
    for index, qkv in enumerate(work.tokens):
        output, q = layer.step(qkv, work.tables, work.prefix_lengths + np.int32(index))
        outputs.append(layer.to_host(output))
        queries.append(layer.to_host(q).view(np.uint8))
    return Result(
        outputs=np.stack(outputs),
        queries=np.stack(queries),
        cache=layer.to_host(layer.cache).view(np.uint8),
    )


def dealt_out(cache: Bytes, data: int, ranks: int, page_size: int, interleave: int) -> Bytes:
    """The one device's cache [data * pages, S * D, 576] as [data * D * pages, S, 576] of ranks."""
    runs = cache.reshape(data, -1, page_size // interleave, ranks, interleave, ROW)
    return np.moveaxis(runs, 3, 1).reshape(-1, page_size, ROW)


def report(actual: Result, expected: Result, interleave: int) -> bool:
    """Prints a line; whether the mesh did what one device does."""
    queries = np.count_nonzero(actual.queries != expected.queries)
    cache = np.count_nonzero(actual.cache != expected.cache)
    difference = np.linalg.norm(actual.outputs - expected.outputs)
    error = float(difference / np.linalg.norm(expected.outputs))
    who = f"process {jax.process_index()}, " if jax.process_count() > 1 else ""
    print(
        f"{who}interleave {interleave:2}: {queries} of {actual.queries.size} query bytes and"
        f" {cache} of {actual.cache.size} cache bytes differ,"
        f" outputs by {error:.1e} ({TOLERANCE:.0e} may)"
    )
    # A NaN anywhere makes `error` NaN, which is not within a bound.
    return queries == 0 and cache == 0 and error <= TOLERANCE


def compare(
    options: argparse.Namespace,
    mesh: jax.sharding.Mesh,
    mailbox: jax_mla.DcpMailbox | None = None,
    on_mesh: type[OnMesh] = OnMesh,
) -> bool:
    """Prints a line for each interleave; whether the mesh did what one device does in all."""
    first, (data, tensor, ranks) = mesh.local_devices[0], mesh.axis_sizes
    ran = "the jax.numpy reference" if jax_mla.supported(first) else "the CUDA kernel"
    if jax.process_index() == 0:
        print(f"{data} data x {tensor} tensor x {ranks} dcp of {first.device_kind}: {ran}")
    work = random_work(options)
    pages = work.pages, options.page_size
    whole = decode(OnOneDevice(work.layer, mesh, *pages), work)
    agree = []
    for interleave in options.interleave:
        layer = on_mesh(work.layer, mesh, *pages, interleave=interleave, mailbox=mailbox)
        split = decode(layer, work)
        cache = dealt_out(whole.cache, data, ranks, options.page_size, interleave)
        agree.append(report(split, dataclasses.replace(whole, cache=cache), interleave))
    return all(agree)


def devices(count: int) -> list[jax.Device]:
    """So many GPUs, or made-up CPU devices where there are fewer."""
    jax.config.update("jax_num_cpu_devices", count)
    found = jax.devices()
    return found[:count] if len(found) >= count else jax.devices("cpu")[:count]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Decode on a mesh and compare with one device.")
    parser.add_argument(
        "--mesh",
        type=int,
        nargs=3,
        default=(2, 2, 2),
        metavar=("DATA", "TENSOR", "DCP"),
        help="ranks along each mesh axis",
    )
    parser.add_argument("--heads", type=int, default=2, help="heads on each device")
    parser.add_argument("--batch", type=int, default=2, help="sequences on each data shard")
    parser.add_argument("--prefill", type=int, default=40, help="longest prefix")
    parser.add_argument("--steps", type=int, default=8, help="tokens to decode")
    parser.add_argument("--page-size", type=int, default=16, help="cache rows a page")
    parser.add_argument("--interleave", type=int, nargs="+", default=(1, 16))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--mailbox",
        action="store_true",
        help="gather queries through a DcpMailbox, on GPUs of one process; where there are fewer"
        " than --mesh says, two processes share a GPU, as a mesh of 1 1 2",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 when mesh and one device agree, else 1."""
    options = parse(arguments)
    if options.mailbox:
        agree = dcp_mailbox.agrees(options, compare)
    else:
        mesh = jax.make_mesh(options.mesh, NAMES, devices=devices(math.prod(options.mesh)))
        agree = compare(options, mesh)
    print("ok" if agree else "FAILED: the mesh did not do what one device does")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
