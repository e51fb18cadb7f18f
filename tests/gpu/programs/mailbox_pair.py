"""One of two processes that share a GPU, each a rank of a mesh of two: what they gather is checked.

python mailbox_pair.py PROCESS PORT

Ends with an error where a byte is wrong; process 1 kills itself at the end.
"""

import functools
import os
import signal
import sys
import time
from typing import Any

import jax
import numpy as np
import pytest
from jax._src.distributed import global_state

import jax_mla
from jax_mla import dcp
from jax_mla.testing import Bytes, bytes_of, make_inputs

AXES = jax_mla.MeshAxes(dcp="dcp")
RANKS, HEADS, MOST_TOKENS = 2, 6, 64
Q_SCALE, K_SCALE = 0.02, 0.03
SECONDS = 1.0
"""How long the impatient mailbox waits."""


class Rank:
    """A process, its GPU and its place in the mesh."""

    def __init__(self, process: int, port: int) -> None:
        self.process = process
        jax.distributed.initialize(f"127.0.0.1:{port}", RANKS, process, local_device_ids=[0])
        devices = jax.devices()[::-1]  # so that a rank is no process index
        self.mesh = jax.sharding.Mesh(np.array(devices), ("dcp",))
        self.rank = devices.index(jax.local_devices()[0])
        self.steps: dict[bool, Any] = {}

    def meet(self, name: str) -> None:
        client: Any = global_state.client
        client.wait_at_barrier(name, 120_000)

    def place(self, inputs: dict[str, Any]) -> dict[str, Any]:
        at = AXES.shardings(self.mesh)
        return {
            name: jax.make_array_from_callback(x.shape, getattr(at, name), x.__getitem__)
            for name, x in inputs.items()
        }

    def expected(self, inputs: dict[str, Any]) -> tuple[Bytes, Bytes]:
        """(q, this rank's cache) by separate calls of one device for each rank's heads."""
        queries, cache = [], None
        for rank in range(RANKS):
            own = inputs | {
                name: np.split(inputs[name], RANKS)[rank] for name in ("w_qb", "w_uk", "cache")
            }
            own["slots"] = inputs["slots"][rank]
            q, stored = call(**own)
            queries.append(bytes_of(q))
            if rank == self.rank:
                cache = bytes_of(stored)
        assert cache is not None
        return np.concatenate(queries, axis=1), cache


def call(**arguments: Any) -> tuple[jax.Array, jax.Array]:
    scales: dict[str, Any] = {"q_scale": Q_SCALE, "k_scale": K_SCALE}
    return jax_mla.q_absorb(**arguments, **scales, implementation="cuda")


def global_inputs(batch: int, seed: int) -> dict[str, Any]:
    """NumPy arguments of the mesh; a token in nine is NaN, as is its query."""
    inputs = make_inputs(batch, RANKS * HEADS, pages=8, page_size=32, seed=seed)
    inputs["qkv"] = inputs["qkv"].at[8::9].set(np.nan)
    tables = np.repeat(np.array([[0, 3, 1, 2]], np.int32), batch, axis=0)
    slots = dcp.local_slots(tables, np.arange(batch, dtype=np.int32), page_size=32, dcp=RANKS)
    return {name: np.asarray(value) for name, value in (inputs | {"slots": slots}).items()}


def own_bytes(result: jax.Array) -> Bytes:
    return bytes_of(result.addressable_shards[0].data)


def check(rank: Rank, inputs: dict[str, Any], q: jax.Array, cache: jax.Array) -> None:
    expected_q, expected_cache = rank.expected(inputs)
    assert np.array_equal(own_bytes(q), expected_q)
    assert np.array_equal(own_bytes(cache), expected_cache)


def eager_and_jitted_calls(rank: Rank, mailbox: jax_mla.DcpMailbox) -> None:
    gather = functools.partial(call, axes=AXES, mailbox=mailbox)
    step = jax.jit(gather)
    for seed, batch in enumerate((1, 8, 3, MOST_TOKENS, 2, 17)):
        inputs = global_inputs(batch, seed)
        with jax.set_mesh(rank.mesh):
            eager, jitted = gather(**rank.place(inputs)), step(**rank.place(inputs))
        check(rank, inputs, *eager)
        check(rank, inputs, *jitted)
        text = str(step.lower(**rank.place(inputs)).compile().as_text())
    assert "jax_mla_exchange" in text
    assert "all-gather" not in text


def programs_in_turns(rank: Rank, mailbox: jax_mla.DcpMailbox) -> None:
    """A scan over layers and a chain of calls, which XLA replays as CUDA graphs, in turns."""

    @jax.jit
    def scanned(inputs: dict[str, Any], layers: jax.Array) -> Any:
        def layer(cache: jax.Array, weights: jax.Array) -> Any:
            arguments = inputs | {"cache": cache, "qkv": inputs["qkv"] * weights}
            q, cache = call(**arguments, axes=AXES, mailbox=mailbox)
            return cache, q

        return jax.lax.scan(layer, inputs["cache"], layers)

    @jax.jit
    def chained(inputs: dict[str, Any], layers: jax.Array) -> Any:
        cache, queries = inputs["cache"], []
        for factor in layers:
            arguments = inputs | {"cache": cache, "qkv": inputs["qkv"] * factor}
            q, cache = call(**arguments, axes=AXES, mailbox=mailbox)
            queries.append(q)
        return cache, jax.numpy.stack(queries)

    factors = np.array([1, -1, 2, 0.5, -2, 4, 1], np.float32).astype(jax.numpy.bfloat16)
    layers = jax.make_array_from_callback(
        factors.shape,
        jax.NamedSharding(rank.mesh, jax.sharding.PartitionSpec()),
        factors.__getitem__,
    )
    cases = []
    for program, batch in ((scanned, 3), (chained, 8)):
        inputs = global_inputs(batch, seed=20 + batch)
        single = [inputs | {"qkv": inputs["qkv"] * factor} for factor in factors]
        queries = np.stack([rank.expected(arguments)[0] for arguments in single])
        cases.append((program, rank.place(inputs), queries))
    with jax.set_mesh(rank.mesh):
        for replay in range(60):
            for program, inputs, queries in cases:
                _, found = program(inputs, layers)
                if replay % 6 == 0:
                    assert np.array_equal(own_bytes(found), queries), replay
        mailbox.check()


def a_rank_that_does_not_call(rank: Rank) -> None:
    """Process 1 leaves a call out, then dies: process 0 is told each time, and goes on."""
    mailbox = jax_mla.DcpMailbox(rank.mesh, "dcp", max_batch=2, heads=HEADS, timeout=SECONDS)
    step = jax.jit(functools.partial(call, axes=AXES, mailbox=mailbox))
    inputs = global_inputs(2, seed=50)
    arguments = rank.place(inputs)
    expected, _ = rank.expected(inputs)
    with jax.set_mesh(rank.mesh):
        step.lower(**arguments).compile()
        rank.meet("compiled")
        q, _ = step(**arguments)
        assert np.array_equal(own_bytes(q), expected)
        if rank.process == 0:
            lonely_call(rank, mailbox, step, arguments, expected)
        rank.meet("gave up")
        mailbox.reset()
        q, _ = step(**arguments)
        assert np.array_equal(own_bytes(q), expected)
    rank.meet("right again")
    if rank.process == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    with jax.set_mesh(rank.mesh):
        lonely_call(rank, mailbox, step, arguments, expected)


def lonely_call(rank: Rank, mailbox: Any, step: Any, arguments: Any, expected: Bytes) -> None:
    start = time.monotonic()
    q, _ = step(**arguments)
    found = own_bytes(q)
    waited = time.monotonic() - start
    assert SECONDS <= waited < SECONDS + 5, waited
    own = np.arange(RANKS * HEADS) // HEADS == rank.rank
    assert np.array_equal(found[:, own], expected[:, own])
    assert (found[:, ~own] == 0x7F).all()
    with pytest.raises(jax_mla.PeerTimeout, match=f"rank {1 - rank.rank} of axis 'dcp'"):
        mailbox.check()
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"rank {1 - rank.rank}"):
        jax.block_until_ready(step(**arguments))


def main(process: int, port: int) -> None:
    rank = Rank(process, port)
    with jax_mla.DcpMailbox(rank.mesh, "dcp", max_batch=MOST_TOKENS, heads=HEADS) as mailbox:
        eager_and_jitted_calls(rank, mailbox)
        programs_in_turns(rank, mailbox)
    a_rank_that_does_not_call(rank)
    print("done", flush=True)
    os._exit(0)  # without the farewell that the killed process will not join


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
