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
from jax.sharding import AbstractMesh, ManualAxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_mla import reference, rules, runtime, variants
from jax_mla.dcp.mailbox import DcpMailbox
from jax_mla.errors import WITHOUT_MAILBOX, UnsupportedError
from jax_mla.formats import STYLES, Form

OPERANDS = ("qkv", "q_norm", "kv_norm", "w_qb", "w_uk", "cache", "slots", "q_scale", "k_scale")
ROPE_OPERANDS = ("cos_sin", "positions")
"""Further ones of calls that rotate."""
_QKV, _CACHE = OPERANDS.index("qkv"), OPERANDS.index("cache")
_CACHE_SOURCES = {"qkv", "kv_norm", "cache", "slots", "k_scale", *ROPE_OPERANDS}
_LATENT_SOURCES = {"qkv", "q_norm"}

AnyMesh = Mesh | AbstractMesh

_log = logging.getLogger("jax_mla")

q_absorb_p = Primitive("jax_mla_q_absorb")
q_absorb_p.multiple_results = True


def bind(
    arrays: Mapping[str, Any],
    form: Form,
    *,
    eps: float,
    implementation: str,
    dcp_axis: str | None,
    mailbox: DcpMailbox | None,
) -> tuple[jax.Array, ...]:
    """Returns (q, cache) of what one device holds, and the query latent where `form` says so.

    Args:
        arrays: by the names of OPERANDS and, where `form` has a style, ROPE_OPERANDS; checked.
        form: what the call computes.
        eps, implementation: as for `jax_mla.q_absorb`.
        dcp_axis: manual mesh axis whose ranks' heads q is to hold, in order of ranks; None for the
            heads of this device only.
        mailbox: through which they are gathered; None for a collective of JAX.
    """
    operands = [arrays[name] for name in _names(form)]
    _refuse_global_arrays(_names(form), (known_spec(operand) for operand in operands))
    ranks = 1 if dcp_axis is None else jax.lax.axis_size(dcp_axis)
    return tuple(
        q_absorb_p.bind(
            *operands,
            form=form,
            eps=eps,
            implementation=implementation,
            dcp_axis=dcp_axis,
            ranks=ranks,
            mailbox=mailbox,
        )
    )


def _names(form: Form) -> tuple[str, ...]:
    return OPERANDS + ROPE_OPERANDS if form.style else OPERANDS


def _by_name(operands: Iterable[Any], form: Form) -> dict[str, Any]:
    return dict(zip(_names(form), operands, strict=True))


def _result_types(
    *operands: Any,
    form: Form,
    dcp_axis: str | None,
    ranks: int,
    mailbox: DcpMailbox | None,
    **_: Any,
) -> tuple[Any, ...]:
    arrays = _by_name(operands, form)
    problem = rules.problem_of(arrays, form)
    rules.check_limits(problem)
    if mailbox is not None:
        _check_mailbox(mailbox, jax.sharding.get_abstract_mesh(), dcp_axis, problem)
    _refuse_global_arrays(arrays, (operand.sharding.spec for operand in operands))

    def varying(sources: Iterable[str], but_for: str | None = None) -> ManualAxisType:
        """The type of a result that differs along every mesh axis along which a source does."""
        found = (arrays[name].manual_axis_type.varying for name in sources if name in arrays)
        return ManualAxisType(varying=frozenset().union(*found) - {but_for})

    cache = arrays["cache"].update(manual_axis_type=varying(_CACHE_SOURCES))
    q = cache.update(
        shape=(problem.batch, problem.heads * ranks, form.geometry.row),
        dtype=jnp.dtype(form.q_dtype),
        # Gathered heads are the same on all ranks, those of a single rank too.
        manual_axis_type=varying(arrays, but_for=dcp_axis),
    )
    if not form.q_latent:
        return q, cache
    latent_shape = (problem.batch, form.geometry.q_rank)
    latent_type = varying(_LATENT_SOURCES)
    return q, cache, arrays["qkv"].update(shape=latent_shape, manual_axis_type=latent_type)


q_absorb_p.def_abstract_eval(_result_types)
q_absorb_p.def_impl(functools.partial(xla.apply_primitive, q_absorb_p))


def known_spec(x: Any) -> P:
    """Returns how an array is split: a concrete one, or a traced one over Explicit axes."""
    concrete = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    sharding = x.sharding if concrete else jax.typeof(x).sharding
    split = isinstance(sharding, NamedSharding) and not sharding.is_fully_replicated
    return sharding.spec if split else P()


def _refuse_global_arrays(names: Iterable[str], specs: Iterable[P]) -> None:
    for name, spec in zip(names, specs, strict=True):
        if any(axes is not None for axes in spec):
            raise ValueError(
                f"{rules.label(name)} must be whole on each device, got it sharded as {spec}."
                " Name the mesh axes with axes=, or call q_absorb inside jax.shard_map."
            )


def _kernel(*operands: jax.Array, form: Form, key: str, eps: float) -> Sequence[jax.Array]:
    problem = rules.problem_of(_by_name(operands, form), form)
    if problem.columns % 8:  # the kernels read 16 aligned bytes at a time
        qkv = operands[_QKV][:, : form.geometry.qkv_columns]
        operands = (*operands[:_QKV], qkv, *operands[_QKV + 1 :])
    cache = operands[_CACHE]
    results = [
        jax.ShapeDtypeStruct((problem.batch, problem.heads, form.geometry.row), form.q_dtype),
        jax.ShapeDtypeStruct(cache.shape, cache.dtype),
    ]
    if form.q_latent:
        results.append(jax.ShapeDtypeStruct((problem.batch, form.geometry.q_rank), jnp.bfloat16))
    call = jax.ffi.ffi_call(runtime.TARGET, results, input_output_aliases={_CACHE: 1})
    attributes = {
        "kernel": key,
        "abi": np.int32(variants.ABI),
        "eps": np.float32(eps),
        "style": np.int32(STYLES.index(form.style) + 1 if form.style else 0),
    }
    return call(*operands, **attributes)


def _usable_kernel(problem: rules.Problem, implementation: str) -> str | None:
    """Returns the key of the kernel to use, loaded on every GPU of this process.

    None, and a line in the log, where the reference has to stand in.
    """
    unproven = variants.unproven_reason(problem.form)
    try:
        if reason := variants.unsupported_reason(problem.form):
            raise UnsupportedError(reason)
        if unproven and implementation == "auto":
            raise UnsupportedError(unproven)
        key = variants.choose(problem.batch, problem.heads, problem.form).key
        cuda = backends().get("cuda")
        for device in cuda.local_devices() if cuda else ():
            runtime.load(key, device.local_hardware_id)
    except UnsupportedError as error:
        if implementation == "cuda":
            raise
        _log.warning("q_absorb uses the reference instead of a kernel: %s", error)
        return None
    if unproven:
        _log.warning("q_absorb uses kernel %s, as asked: %s", key, unproven)
    return key


def _lowering(local: Callable[..., Sequence[jax.Array]]) -> Any:
    """The lowering rule of `local`, which is what one device does alone, and then the gather."""

    def gathered(
        *operands: jax.Array,
        dcp_axis: Any,
        ranks: int,
        mailbox: DcpMailbox | None,
        **options: Any,
    ) -> tuple[jax.Array, ...]:
        q, *others = local(*operands, **options)
        if ranks > 1:
            q = _all_gather(q, dcp_axis) if mailbox is None else _exchange(q, ranks, mailbox)
        return q, *others

    return mlir.lower_fun(gathered, multiple_results=True)


def _all_gather(q: jax.Array, axis: str) -> jax.Array:
    # As integers: not every platform's collectives know e4m3, and integers keep NaN as it is.
    heads = reference.as_integers(q)
    if axis not in jax.typeof(heads).manual_axis_type.varying:  # results of ffi_call never are
        heads = jax.lax.pcast(heads, axis, to="varying")
    heads = jax.lax.all_gather(heads, axis, axis=1, tiled=True, to="invarying")
    return jax.lax.bitcast_convert_type(heads, q.dtype)


def _exchange(q: jax.Array, ranks: int, mailbox: DcpMailbox) -> jax.Array:
    batch, heads, columns = q.shape
    result = jax.ShapeDtypeStruct((batch, ranks * heads, columns), q.dtype)
    # Ranks wait for each other here: XLA must not move it into a branch that not all of them take.
    call = jax.ffi.ffi_call(runtime.EXCHANGE_TARGET, result, has_side_effect=True)
    gathered: jax.Array = call(
        q,
        kernel=variants.EXCHANGE.key,
        abi=np.int32(variants.ABI),
        mailbox=np.int32(mailbox.number),
    )
    return gathered


def _check_mailbox(
    mailbox: DcpMailbox, mesh: AnyMesh, dcp_axis: str | None, problem: rules.Problem
) -> None:
    mailbox.require(
        mesh,
        dcp_axis,
        batch=problem.batch,
        heads=problem.heads,
        q_dtype=problem.form.q_dtype,
    )


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


def _lower_for_cuda(
    ctx: Any, *operands: Any, form: Form, implementation: str, **params: Any
) -> Any:
    problem = rules.problem_of(_by_name(ctx.avals_in, form), form)
    if params["mailbox"] is not None:
        # While tracing the order of the mesh's devices may not have been known.
        mesh = ctx.module_context.axis_context.mesh
        _check_mailbox(params["mailbox"], mesh, params["dcp_axis"], problem)
    if implementation != "reference":
        _refuse_hidden_gather(ctx)
        if key := _usable_kernel(problem, implementation):
            return _lower_kernel(ctx, *operands, form=form, key=key, **params)
    return _lower_reference(ctx, *operands, form=form, **params)


def _lower_elsewhere(ctx: Any, *operands: Any, implementation: str, **params: Any) -> Any:
    if params["mailbox"] is not None:
        raise UnsupportedError(
            "mailbox needs NVIDIA GPUs, the program is compiled for"
            f" {' and '.join(ctx.module_context.platforms)}. Use them, or {WITHOUT_MAILBOX}"
        )
    if implementation == "cuda":
        if reason := variants.unsupported_reason(params["form"]):
            raise UnsupportedError(reason)
        raise UnsupportedError(
            'implementation="cuda" needs an NVIDIA GPU, the program is compiled for'
            f" {' and '.join(ctx.module_context.platforms)}."
            ' Use "auto" for the reference where there is no kernel.'
        )
    return _lower_reference(ctx, *operands, **params)


mlir.register_lowering(q_absorb_p, _lower_for_cuda, platform="cuda")
mlir.register_lowering(q_absorb_p, _lower_elsewhere)


def _batch(operands: Any, dims: Any, *, form: Form, **params: Any) -> tuple[Any, Any]:
    """Lanes become more tokens; they share one cache, which comes back without a lane axis."""
    names = _names(form)
    mapped = {name for name, dim in zip(names, dims, strict=True) if dim is not None}
    expected = {"qkv", "slots", "positions"} & set(names)
    if mapped != expected:
        raise NotImplementedError(
            f"q_absorb under jax.vmap must have {_listed(expected)} mapped and nothing else, got"
            f" {_listed(mapped)} mapped. Call it once for each cache or set of weights."
        )
    flat = list(operands)
    for name in expected:
        i = names.index(name)
        lanes = jnp.moveaxis(operands[i], dims[i], 0)
        flat[i] = lanes.reshape(lanes.shape[0] * lanes.shape[1], *lanes.shape[2:])
    q, cache, *latent = q_absorb_p.bind(*flat, form=form, **params)
    split = [x.reshape(*lanes.shape[:2], *x.shape[1:]) for x in (q, *latent)]
    return (split[0], cache, *split[1:]), (0, None, *[0] * len(latent))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


batching.primitive_batchers[q_absorb_p] = _batch


def _refuse_derivative(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(
        "q_absorb has no derivative: it is for inference."
        " Apply jax.lax.stop_gradient to its arguments, or differentiate unquantised attention."
    )


ad.primitive_jvps[q_absorb_p] = _refuse_derivative
ad.primitive_transposes[q_absorb_p] = _refuse_derivative
