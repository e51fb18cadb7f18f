"""The operation as one JAX primitive: what one device does.

On NVIDIA GPUs it lowers to the custom call, elsewhere to the reference. Being a primitive, it
behaves alike on all platforms under vmap, grad and shard_map.
"""

import functools
import logging
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.backend import backends
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from jax_mla import reference, rules, runtime, variants
from jax_mla.errors import UnsupportedError

OPERANDS = ("qkv", "q_norm", "kv_norm", "w_qb", "w_uk", "cache", "slots", "q_scale", "k_scale")
_QKV, _CACHE, _SLOTS = (OPERANDS.index(name) for name in ("qkv", "cache", "slots"))
_CACHE_SOURCES = [OPERANDS.index(name) for name in ("qkv", "kv_norm", "cache", "slots", "k_scale")]

_log = logging.getLogger("jax_mla")

q_absorb_p = Primitive("jax_mla_q_absorb")
q_absorb_p.multiple_results = True


def bind(*operands: Any, eps: float, implementation: str) -> tuple[jax.Array, jax.Array]:
    """Returns (q, cache) of the operands, which are in the order of OPERANDS and checked."""
    q, cache = q_absorb_p.bind(*operands, eps=eps, implementation=implementation)
    return q, cache


def _result_types(*operands: Any, eps: float, implementation: str) -> tuple[Any, Any]:
    problem = rules.problem_of(*operands)
    _refuse_global_arrays(operands)
    cache = operands[_CACHE].update(
        manual_axis_type=_varying([operands[i] for i in _CACHE_SOURCES])
    )
    q_shape = (problem.batch, problem.heads, rules.ROW)
    return cache.update(shape=q_shape, manual_axis_type=_varying(operands)), cache


q_absorb_p.def_abstract_eval(_result_types)
q_absorb_p.def_impl(functools.partial(xla.apply_primitive, q_absorb_p))


def _varying(sources: Any) -> jax.sharding.ManualAxisType:
    """The type of a result that differs along every mesh axis along which a source does."""
    axes = frozenset().union(*(source.manual_axis_type.varying for source in sources))
    return jax.sharding.ManualAxisType(varying=axes)


def _refuse_global_arrays(operands: Any) -> None:
    for name, operand in zip(OPERANDS, operands, strict=True):
        if any(axes is not None for axes in operand.sharding.spec):
            raise ValueError(
                f"{name} must be whole on each device, got it sharded as {operand.sharding.spec}."
                " Call q_absorb inside jax.shard_map."
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


_lower_reference = mlir.lower_fun(reference.q_absorb, multiple_results=True)
_lower_kernel = mlir.lower_fun(_kernel, multiple_results=True)


def _refuse_hidden_gather(ctx: Any) -> None:
    devices = getattr(ctx.module_context.axis_context, "num_devices", None) or 1
    # Explicit axes were checked by type, and shard_map's context counts no devices.
    if devices > 1 and not ctx.avals_in[_QKV].sharding.mesh.are_all_axes_explicit:
        raise ValueError(
            f"q_absorb must be compiled for the arrays of one device, got a jit over {devices}"
            " devices, where the compiler would gather sharded weights and cache on each."
            " Call q_absorb inside jax.shard_map."
        )


def _lower_for_cuda(ctx: Any, *operands: Any, eps: float, implementation: str) -> Any:
    if implementation != "reference":
        _refuse_hidden_gather(ctx)
        problem = rules.problem_of(*ctx.avals_in)
        key = variants.choose(problem.batch, problem.heads).key
        if _load(key, implementation):
            return _lower_kernel(ctx, *operands, key=key, eps=eps)
    return _lower_reference(ctx, *operands, eps=eps)


def _lower_elsewhere(ctx: Any, *operands: Any, eps: float, implementation: str) -> Any:
    if implementation == "cuda":
        raise UnsupportedError(
            'implementation="cuda" needs an NVIDIA GPU, the program is compiled for'
            f" {' and '.join(ctx.module_context.platforms)}."
            ' Use "auto" for the reference where there is no kernel.'
        )
    return _lower_reference(ctx, *operands, eps=eps)


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
