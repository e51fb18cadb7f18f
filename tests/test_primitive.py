"""q_absorb under JAX's transformations, on the platform that runs the tests."""

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mla
from jax_mla import config
from jax_mla.testing import bytes_of, make_inputs

Inputs = dict[str, Any]


def assert_same(got: Any, expected: Any) -> None:
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(bytes_of(a), bytes_of(b))


def absorb(inputs: Inputs, **options: Any) -> tuple[jax.Array, jax.Array]:
    return jax_mla.q_absorb(**inputs, **options)


@pytest.fixture
def inputs() -> Inputs:
    return make_inputs(4, 2)


def test_eager_jit_and_repeated_calls_give_the_same_bits(inputs: Inputs) -> None:
    expected = absorb(inputs, q_scale=0.1, k_scale=0.2)
    jitted = jax.jit(absorb, static_argnames=("eps", "implementation"))
    for _ in range(2):
        assert_same(absorb(inputs, q_scale=0.1, k_scale=0.2), expected)
        assert_same(jitted(inputs, q_scale=0.1, k_scale=0.2), expected)
        assert_same(jitted(inputs, q_scale=jnp.float32(0.1), k_scale=np.float32(0.2)), expected)


def test_scan_carries_the_cache(inputs: Inputs) -> None:
    steps = [make_inputs(4, 2, seed=seed) for seed in range(3)]
    weights = {name: inputs[name] for name in ("q_norm", "kv_norm", "w_qb", "w_uk")}

    def step(cache: jax.Array, token: Inputs) -> tuple[jax.Array, jax.Array]:
        q, cache = jax_mla.q_absorb(**weights, cache=cache, **token)
        return cache, q

    tokens = [{"qkv": given["qkv"], "slots": given["slots"]} for given in steps]
    cache, queries = inputs["cache"], []
    for token in tokens:
        cache, q = step(cache, token)
        queries.append(bytes_of(q))
    stacked = {name: jnp.stack([token[name] for token in tokens]) for name in tokens[0]}
    got = jax.jit(lambda cache, xs: jax.lax.scan(step, cache, xs))(inputs["cache"], stacked)
    assert_same(got, (cache, np.stack(queries).view(jnp.float8_e4m3fn)))


def test_a_donated_cache_is_updated_in_place(inputs: Inputs) -> None:
    step = jax.jit(jax_mla.q_absorb, donate_argnames="cache").lower(**inputs).compile()
    text = step.as_text() or ""
    assert "input_output_alias={ {1}: (0, {}, may-alias) }" in text
    cache = f"u8[{','.join(map(str, inputs['cache'].shape))}]"
    assert not [line for line in text.splitlines() if " copy(" in line and cache in line]
    _, expected = absorb(inputs)
    # JAX may use numpy's memory for an array made from it, and then donates a copy.
    inputs["cache"] = jnp.array(inputs["cache"], copy=True)
    place = inputs["cache"].unsafe_buffer_pointer()
    _, updated = step(**inputs)
    assert inputs["cache"].is_deleted()
    assert updated.unsafe_buffer_pointer() == place
    np.testing.assert_array_equal(bytes_of(updated), bytes_of(expected))


def test_a_cache_that_is_not_donated_stays(inputs: Inputs) -> None:
    before = bytes_of(inputs["cache"]).copy()
    _, updated = jax.jit(absorb)(inputs)
    np.testing.assert_array_equal(bytes_of(inputs["cache"]), before)
    assert (bytes_of(updated) != before).any()


def test_numpy_arguments_are_taken(inputs: Inputs) -> None:
    assert_same(absorb({name: np.asarray(a) for name, a in inputs.items()}), absorb(inputs))


def test_x64_changes_nothing(inputs: Inputs) -> None:
    expected = absorb(inputs, q_scale=0.1)
    with jax.enable_x64(True):
        assert_same(absorb(inputs, q_scale=0.1), expected)
        assert_same(
            jax.jit(lambda given, scale: absorb(given, q_scale=scale))(inputs, 0.1), expected
        )
        with pytest.raises(TypeError, match="slots must have dtype int32, got int64"):
            absorb(inputs | {"slots": jnp.arange(4)})
        with pytest.raises(TypeError, match="q_scale must have dtype float32, got float64"):
            absorb(inputs, q_scale=jnp.asarray(np.float64(0.1)))


def test_eval_shape_and_rematerialisation(inputs: Inputs) -> None:
    q, cache = jax.eval_shape(absorb, inputs)
    assert (q.shape, q.dtype) == ((4, 2, 576), jnp.float8_e4m3fn)
    assert (cache.shape, cache.dtype) == (inputs["cache"].shape, jnp.float8_e4m3fn)
    assert_same(jax.checkpoint(absorb)(inputs), absorb(inputs))


def test_vmap_adds_tokens_of_one_cache() -> None:
    flat = make_inputs(12, 2)
    lanes = flat | {"qkv": flat["qkv"].reshape(3, 4, 2112), "slots": flat["slots"].reshape(3, 4)}
    axes = {name: 0 if name in ("qkv", "slots") else None for name in lanes}
    q, cache = jax.vmap(absorb, in_axes=(axes,), out_axes=(0, None))(lanes)
    expected_q, expected_cache = absorb(flat)
    assert_same((q.reshape(12, 2, 576), cache), (expected_q, expected_cache))
    moved = lanes | {"qkv": lanes["qkv"].transpose(1, 0, 2), "slots": lanes["slots"].T}
    axes |= {"qkv": 1, "slots": 1}
    assert_same(jax.vmap(absorb, in_axes=(axes,), out_axes=(0, None))(moved), (q, cache))


@pytest.mark.parametrize("mapped", [["cache", "qkv", "slots"], ["qkv"], ["slots"], ["w_qb"]])
def test_vmap_over_anything_else_is_refused(inputs: Inputs, mapped: list[str]) -> None:
    lanes = inputs | {name: jnp.stack([inputs[name]] * 2) for name in mapped}
    axes = {name: 0 if name in mapped else None for name in lanes}
    with pytest.raises(NotImplementedError, match=rf"got {', '.join(mapped)} mapped\. Call"):
        jax.vmap(absorb, in_axes=(axes,))(lanes)


def total(inputs: Inputs, **options: Any) -> jax.Array:
    return absorb(inputs, **options)[0].astype(jnp.float32).sum()


@pytest.mark.parametrize("name", ["qkv", "q_norm", "w_uk", "q_scale"])
def test_derivatives_are_refused(inputs: Inputs, name: str) -> None:
    given = inputs | {"q_scale": jnp.float32(1)}
    with pytest.raises(NotImplementedError, match=r"no derivative.*stop_gradient"):
        jax.grad(lambda x: total(given | {name: x}))(given[name])
    with pytest.raises(NotImplementedError, match=r"no derivative.*stop_gradient"):
        jax.jvp(lambda x: total(given | {name: x}), (given[name],), (given[name],))


def test_derivatives_around_it_work(inputs: Inputs) -> None:
    def loss(factor: jax.Array, qkv: jax.Array) -> jax.Array:
        stopped = jax.lax.stop_gradient(qkv * factor.astype(qkv.dtype))
        return factor * total(inputs | {"qkv": stopped})

    value = total(inputs)
    assert value != 0
    for f in (loss, jax.checkpoint(loss), jax.jit(loss)):
        assert jax.grad(f)(jnp.float32(1), inputs["qkv"]) == value


@pytest.fixture
def mesh() -> AbstractMesh:
    return AbstractMesh((2, 2), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)


def sharded(mesh: Any, out_specs: Any) -> Callable[..., Any]:
    """Tokens and pages split over dp, heads over tp."""
    specs = dict.fromkeys(("qkv", "cache", "slots"), P("dp"))
    specs |= dict.fromkeys(("w_qb", "w_uk"), P("tp")) | dict.fromkeys(("q_norm", "kv_norm"), P())
    return jax.shard_map(absorb, mesh=mesh, in_specs=(specs,), out_specs=out_specs)


def test_shard_map_knows_along_which_axes_results_differ(
    inputs: Inputs, mesh: AbstractMesh
) -> None:
    avals = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in inputs.items()}
    q, cache = jax.eval_shape(sharded(mesh, (P("dp", "tp"), P("dp"))), avals)
    assert (q.shape, cache.shape) == ((4, 2, 576), inputs["cache"].shape)
    for wrong in ((P("dp"), P("dp")), (P(None, "tp"), P("dp")), (P("dp", "tp"), P())):
        with pytest.raises(ValueError, match="out_specs"):
            jax.eval_shape(sharded(mesh, wrong), avals)


def test_shard_map_runs_it(inputs: Inputs) -> None:
    one = jax.make_mesh((1, 1), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    expected = absorb(inputs)
    assert_same(jax.jit(sharded(one, (P("dp", "tp"), P("dp"))))(inputs), expected)


def test_a_sharded_array_outside_of_shard_map_is_refused(inputs: Inputs) -> None:
    explicit = AbstractMesh((2,), ("tp",), axis_types=(AxisType.Explicit,))
    avals = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in inputs.items()}
    avals["w_uk"] = avals["w_uk"].update(sharding=NamedSharding(explicit, P("tp")))
    with (
        jax.sharding.use_abstract_mesh(explicit),
        pytest.raises(ValueError, match=r"w_uk must be whole on each device.*jax\.shard_map"),
    ):
        jax.eval_shape(absorb, avals)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU may run the kernel")
def test_a_platform_without_kernels_uses_the_reference(inputs: Inputs) -> None:
    assert_same(absorb(inputs), absorb(inputs, implementation="reference"))
    with pytest.raises(jax_mla.UnsupportedError, match=r'"cuda" needs an NVIDIA GPU.* cpu\.'):
        absorb(inputs, implementation="cuda")
    assert str(jax_mla.supported()).endswith("kernels are shipped for NVIDIA GPUs only.")


def test_slots_beyond_the_cache_are_reported_on_request(
    inputs: Inputs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slots = jnp.array([0, 128, -1, 500], jnp.int32)
    expected = absorb(inputs | {"slots": slots})
    jax.effects_barrier()
    assert not caplog.records
    monkeypatch.setattr(config, "OPTIONS", config.Options(check_slots=True))
    with caplog.at_level(logging.WARNING, "jax_mla"):
        got = jax.jit(lambda given: absorb(given))(inputs | {"slots": slots})
        jax.effects_barrier()
    assert_same(got, expected)
    assert [record.getMessage() for record in caplog.records] == [
        "slots must be below P * S = 128, got slots[1] = 128; 2 of 4 rows were not stored."
        " Use -1 for a row that must not be stored."
    ]
