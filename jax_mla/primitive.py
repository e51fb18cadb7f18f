"""The operation as one JAX primitive: what one device does, and the gather of queries over ranks.

On NVIDIA GPUs it lowers to the custom call, elsewhere to the reference, and both to the same
collective. Being a primitive, it behaves alike on all platforms under vmap, grad and shard_map.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.backend import backends
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_mla import reference, rules, runtime, variants
from jax_mla.errors import UnsupportedError

OPERANDS = ("qkv", "q_norm", "kv_norm", "w_qb", "w_uk", "cache", "slots", "q_scale", "k_scale")
_QKV, _CACHE, _SLOTS = (OPERANDS.index(name) for name in ("qkv", "cache", "slots"))
_CACHE_SOURCES = [OPERANDS.index(name) for name in ("qkv", "kv_norm", "cache", "slots", "k_scale")]

_log = logging.getLogger("jax_mla")

q_absorb_p = Primitive("jax_mla_q_absorb")
q_absorb_p.multiple_results = True


def bind(
    arrays: Mapping[str, Any], *, eps: float, implementation: str, dcp_axis: str | None
) -> tuple[jax.Array, jax.Array]:
    """Returns (q, cache) of what one device holds.

    Args:
        arrays: by the names of OPERANDS, checked.
        eps, implementation: as for `jax_mla.q_absorb`.
        dcp_axis: manual mesh axis whose ranks' heads q is to hold, in order of ranks; None for the
            heads of this device only.
    """
    operands = [arrays[name] for name in OPERANDS]
    _refuse_global_arrays(known_spec(operand) for operand in operands)
    ranks = 1 if dcp_axis is None else jax.lax.axis_size(dcp_axis)
    q, cache = q_absorb_p.bind(
        *operands, eps=eps, implementation=implementation, dcp_axis=dcp_axis, ranks=ranks
    )
    return q, cache


def _result_types(
    *operands: Any, eps: float, implementation: str, dcp_axis: str | None, ranks: int
) -> tuple[Any, Any]:
    problem = rules.problem_of(*operands)
    rules.check_limits(problem)
    _refuse_global_arrays(operand.sharding.spec for operand in operands)
    cache = operands[_CACHE].update(
        manual_axis_type=_varying([operands[i] for i in _CACHE_SOURCES])
    )
    # Gathered heads are the same on all ranks, those of a single rank too.
    q_type = _varying(operands, but_for=dcp_axis)
    q_shape = (problem.batch, problem.heads * ranks, rules.ROW)
    return cache.update(shape=q_shape, manual_axis_type=q_type), cache


q_absorb_p.def_abstract_eval(_result_types)
q_absorb_p.def_impl(functools.partial(xla.apply_primitive, q_absorb_p))


def _varying(sources: Any, but_for: str | None = None) -> jax.sharding.ManualAxisType:
    """The type of a result that differs along every mesh axis along which a source does."""
    axes = frozenset().union(*(source.manual_axis_type.varying for source in sources))
    return jax.sharding.ManualAxisType(varying=axes - {but_for})


def known_spec(x: Any) -> P:
    """Returns how an array is split: a concrete one, or a traced one over Explicit axes."""
    concrete = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    sharding = x.sharding if concrete else jax.typeof(x).sharding
    split = isinstance(sharding, NamedSharding) and not sharding.is_fully_replicated
    return sharding.spec if split else P()


def _refuse_global_arrays(specs: Iterable[P]) -> None:
    for name, spec in zip(OPERANDS, specs, strict=True):
        if any(axes is not None for axes in spec):
            raise ValueError(
                f"{name} must be whole on each device, got it sharded as {spec}."
                " Name the mesh axes with axes=, or call q_absorb inside jax.shard_map."
            )


def _kernel(*operands: jax.Array, key: str, eps: float) -> Sequence[jax.Array]:
    problem = rules.problem_of(*operands)
    if problem.columns % 8:  # the kernels read 16 aligned bytes at a time
        qkv = operands[_QKV][:, : rules.QKV_COLUMNS]
        operands = (*operands[:_QKV], qkv, *operands[_QKV + 1 :])
    cache = operands[_CACHE]
    results = [
        jax.ShapeDtypeStruct((problem.batch, problem.heads, rules.ROW), cache.dtype),
        jax.ShapeDtypeStruct(cache.shape, cache.dtype),
    ]
    call = jax.ffi.ffi_call(runtime.TARGET, results, input_output_aliases={_CACHE: 1})
    return call(*operands, kernel=key, abi=np.int32(variants.ABI), eps=np.float32(eps))


def _load(key: str, implementation: str) -> bool:
    """Loads a kernel on every GPU of this process; returns whether the program is to use it."""
    cuda = backends().get("cuda")
    try:
        for device in cuda.local_devices() if cuda else ():
            runtime.load(key, device.local_hardware_id)
    except UnsupportedError as error:
        if implementation == "cuda":
            raise
        _log.warning("q_absorb uses the reference instead of a kernel: %s", error)
        return False
    return True


def _lowering(local: Callable[..., Sequence[jax.Array]]) -> Any:
    """The lowering rule of `local`, which is what one device does alone, and then the gather."""

    def gathered(
        *operands: jax.Array, dcp_axis: Any, ranks: int, **options: Any
    ) -> tuple[jax.Array, jax.Array]:
        q, cache = local(*operands, **options)
        return q if ranks == 1 else _gather_heads(q, dcp_axis), cache

    return mlir.lower_fun(gathered, multiple_results=True)


def _gather_heads(q: jax.Array, axis: str) -> jax.Array:
    # As bytes: not every platform's collectives know e4m3, and bytes keep NaN as it is.
    own = jax.lax.bitcast_convert_type(q, np.uint8)
    heads = jax.lax.all_gather(own, axis, axis=1, tiled=True, to="invarying")
    return jax.lax.bitcast_convert_type(heads, q.dtype)


_lower_reference = _lowering(reference.q_absorb)
_lower_kernel = _lowering(_kernel)


def _refuse_hidden_gather(ctx: Any) -> None:
    devices = getattr(ctx.module_context.axis_context, "num_devices", None) or 1
    # Explicit axes were checked by type, and shard_map's context counts no devices.
    if devices > 1 and not ctx.avals_in[_QKV].sharding.mesh.are_all_axes_explicit:
        raise ValueError(
            f"q_absorb must be compiled for the arrays of one device, got a jit over {devices}"
            " devices, where the compiler would gather sharded weights and cache on each."
            " Name the mesh axes with axes=, or call q_absorb inside jax.shard_map."
        )


def _lower_for_cuda(ctx: Any, *operands: Any, implementation: str, **params: Any) -> Any:
    if implementation != "reference":
        _refuse_hidden_gather(ctx)
        problem = rules.problem_of(*ctx.avals_in)
        key = variants.choose(problem.batch, problem.heads).key
        if _load(key, implementation):
            return _lower_kernel(ctx, *operands, key=key, **params)
    return _lower_reference(ctx, *operands, **params)


def _lower_elsewhere(ctx: Any, *operands: Any, implementation: str, **params: Any) -> Any:
    if implementation == "cuda":
        raise UnsupportedError(
            'implementation="cuda" needs an NVIDIA GPU, the program is compiled for'
            f" {' and '.join(ctx.module_context.platforms)}."
            ' Use "auto" for the reference where there is no kernel.'
        )
    return _lower_reference(ctx, *operands, **params)


mlir.register_lowering(q_absorb_p, _lower_for_cuda, platform="cuda")
mlir.register_lowering(q_absorb_p, _lower_elsewhere)


def _batch(operands: Any, dims: Any, **params: Any) -> tuple[Any, Any]:
    """Lanes become more tokens; they share one cache, which comes back without a lane axis."""
    mapped = {name for name, dim in zip(OPERANDS, dims, strict=True) if dim is not None}
    if mapped != {"qkv", "slots"}:
        raise NotImplementedError(
            "q_absorb under jax.vmap must have qkv and slots mapped and nothing else, got"
            f" {', '.join(sorted(mapped))} mapped. Call it once for each cache or set of weights."
        )
    flat = list(operands)
    for i in (_QKV, _SLOTS):
        lanes = jnp.moveaxis(operands[i], dims[i], 0)
        flat[i] = lanes.reshape(lanes.shape[0] * lanes.shape[1], *lanes.shape[2:])
    q, cache = q_absorb_p.bind(*flat, **params)
    return (q.reshape(lanes.shape[0], lanes.shape[1], *q.shape[1:]), cache), (0, None)


batching.primitive_batchers[q_absorb_p] = _batch


def _refuse_derivative(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(
        "q_absorb has no derivative: it returns 8-bit values and is for inference."
        " Apply jax.lax.stop_gradient to its arguments, or differentiate unquantised attention."
    )


ad.primitive_jvps[q_absorb_p] = _refuse_derivative
ad.primitive_transposes[q_absorb_p] = _refuse_derivative
