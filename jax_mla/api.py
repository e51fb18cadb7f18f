"""The public functions."""

import numbers
from typing import Any, Literal, overload

import jax
import numpy as np

from jax_mla import formats, geometry, rules, runtime, scalars, sharding, variants
from jax_mla.dcp.mailbox import DcpMailbox
from jax_mla.rope import Rope
from jax_mla.sharding import MeshAxes


@overload
def q_absorb(
    qkv: jax.Array,
    q_norm: jax.Array,
    kv_norm: jax.Array,
    w_qb: jax.Array,
    w_uk: jax.Array,
    cache: jax.Array,
    slots: jax.Array,
    *,
    q_scale: float | jax.Array = 1.0,
    k_scale: float | jax.Array = 1.0,
    eps: float = 1e-6,
    rope: Rope | None = None,
    q_dtype: Any = None,
    return_q_norm: Literal[False] = False,
    axes: MeshAxes | None = None,
    dcp_axis: str | None = None,
    mailbox: DcpMailbox | None = None,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]: ...


@overload
def q_absorb(
    qkv: jax.Array,
    q_norm: jax.Array,
    kv_norm: jax.Array,
    w_qb: jax.Array,
    w_uk: jax.Array,
    cache: jax.Array,
    slots: jax.Array,
    *,
    q_scale: float | jax.Array = 1.0,
    k_scale: float | jax.Array = 1.0,
    eps: float = 1e-6,
    rope: Rope | None = None,
    q_dtype: Any = None,
    return_q_norm: Literal[True],
    axes: MeshAxes | None = None,
    dcp_axis: str | None = None,
    mailbox: DcpMailbox | None = None,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array]: ...


@overload
def q_absorb(
    qkv: jax.Array,
    q_norm: jax.Array,
    kv_norm: jax.Array,
    w_qb: jax.Array,
    w_uk: jax.Array,
    cache: jax.Array,
    slots: jax.Array,
    *,
    q_scale: float | jax.Array = 1.0,
    k_scale: float | jax.Array = 1.0,
    eps: float = 1e-6,
    rope: Rope | None = None,
    q_dtype: Any = None,
    return_q_norm: bool,
    axes: MeshAxes | None = None,
    dcp_axis: str | None = None,
    mailbox: DcpMailbox | None = None,
    implementation: str = "auto",
) -> tuple[jax.Array, ...]: ...


def q_absorb(
    qkv: jax.Array,
    q_norm: jax.Array,
    kv_norm: jax.Array,
    w_qb: jax.Array,
    w_uk: jax.Array,
    cache: jax.Array,
    slots: jax.Array,
    *,
    q_scale: float | jax.Array = 1.0,
    k_scale: float | jax.Array = 1.0,
    eps: float = 1e-6,
    rope: Rope | None = None,
    q_dtype: Any = None,
    return_q_norm: bool = False,
    axes: MeshAxes | None = None,
    dcp_axis: str | None = None,
    mailbox: DcpMailbox | None = None,
    implementation: str = "auto",
) -> tuple[jax.Array, ...]:
    """Turns one decode step's fused projection into absorbed queries and stores its KV rows.

    B is tokens of the step (0 to 4096), H heads on this device (1 to 128), P pages, S rows of a
    page. The sizes below are DeepSeek's; the shapes of the weights may say those of another model
    (`jax_mla.supported`). Same arguments give the same bits, eager, under jit and in a CUDA graph,
    on one device and on a mesh. A call is of one device's arrays, inside `jax.shard_map` too, or,
    with `axes`, of a whole mesh's arrays: B, H and P then count all devices, which share them out
    evenly.

    Args:
        qkv: [B, W] bf16, W >= 2112. Columns: 1536 query latent, 512 KV latent, 64 k_pe. Further
            columns are ignored. Rows are read in place when W is a multiple of 8, else copied.
        q_norm: [1536] bf16, RMSNorm weight of the query latent (`q_a_layernorm`).
        kv_norm: [512] bf16, RMSNorm weight of the KV latent (`kv_a_layernorm`).
        w_qb: [H * 192, 1536] bf16, `q_b_proj.weight` as in the checkpoint: 128 nope then 64 rope
            rows a head.
        w_uk: [H, 128, 512] bf16, the key half of `kv_b_proj.weight` as in the checkpoint.
        cache: a row holds 512 normalised latent and 64 k_pe columns, in one of three formats:
            [P, S, 576] float8_e4m3fn; [P, S, 576] bfloat16; [P, S, 656] uint8 for fp8_ds_mla (512
            e4m3, 4 float32 scales of 128 of them, 64 bf16). Updated in place when the outermost
            `jax.jit` donates it; otherwise copied.
        slots: [B] int32, p * S + t to store a token's row as row t of page p. A negative slot
            stores nothing and still gives a query; so does one beyond the cache (report these with
            the environment variable JAX_MLA_CHECK_SLOTS=1). Of several tokens with one slot the
            last one is stored. With `axes` that name a dcp axis of D ranks: [D, B], a row for each
            rank (`jax_mla.dcp.local_slots` makes them). A slot counts within its device's pages.
        q_scale: float32 scalar, Python or traced; a query byte is e4m3(value * (1 / q_scale)), to
            nearest even, saturating at +-448, NaN as 0x7F. 1.0 stores values as they are, and is
            the only one with bf16 queries.
        k_scale: the same for e4m3 cache rows; 1.0 with the other formats.
        eps: Python float, added to the mean square in both norms. 1e-6 is DeepSeek's.
        rope: table and positions by which the rope columns of queries and keys are rotated, in
            FP32, and rounded to bf16. None leaves them as they are (NoPE).
        q_dtype: of q, float8_e4m3fn or bfloat16. None for the first where the cache is
            float8_e4m3fn, else for the second, which is then the only one.
        return_q_norm: whether the normalised query latent is returned too, for an indexer.
        axes: names of the mesh axes that split the arrays of a whole mesh; `axes.shardings()` says
            how each must be laid out, and a whole array is split on the way. An array known to be
            split otherwise is refused; under jit the layout on Auto axes is not known and left to
            the compiler. None for the arrays of one device.
        dcp_axis: inside your own `jax.shard_map` over all mesh axes: the one axis over whose D
            ranks queries are gathered, heads in order of ranks. None gathers nothing.
        mailbox: through which queries are gathered, on NVIDIA GPUs of one host: the same bits as
            without, sooner. None for a collective of JAX, anywhere.
        implementation: "auto" for the kernel where there is one for such a call that has run on
            such a GPU, and the reference elsewhere (`jax_mla.supported` says why); "cuda" for the
            kernel or an error; "reference" for plain jax.numpy.

    Returns:
        (q, cache): q is [B, H, 576] of `q_dtype`, 512 absorbed nope then 64 rope columns a head,
        [B, D * H, 576] on each rank of `dcp_axis`; cache is the updated cache. With `return_q_norm`
        (q, cache, q_latent), q_latent [B, 1536] bf16 as Q_B multiplies it. With `axes` they are
        arrays of the mesh, q with each head once, laid out as `axes.shardings()` says.

    Raises:
        TypeError, ValueError: an argument has the wrong dtype or shape, or a value known while
            tracing is out of range; the mesh does not fit `axes` or `dcp_axis`; the call does not
            fit `mailbox`.
        jax_mla.UnsupportedError: "cuda" was asked for and no kernel is shipped for the GPU, or none
            for such a call: `supported` says which.
        jax_mla.SetupError: library, driver or cubin cannot be used.
        NotImplementedError: under grad; under vmap unless exactly qkv, slots and rope's positions
            are mapped (the cache then comes back unmapped: `out_axes=(0, None)`).

    Example:
        >>> import jax, jax.numpy as jnp, jax_mla
        >>> @jax.jit(donate_argnames="cache")
        ... def step(qkv, cache, slots):
        ...     norms = jnp.ones(1536, jnp.bfloat16), jnp.ones(512, jnp.bfloat16)
        ...     weights = jnp.ones((192, 1536), jnp.bfloat16), jnp.ones((1, 128, 512), jnp.bfloat16)
        ...     return jax_mla.q_absorb(qkv, *norms, *weights, cache, slots, q_scale=1e4)
        >>> cache = jnp.zeros((2, 64, 576), jnp.float8_e4m3fn)
        >>> slots = jnp.array([0, 70, -1], jnp.int32)
        >>> q, cache = step(jnp.ones((3, 2112), jnp.bfloat16), cache, slots)
        >>> q.shape
        (3, 1, 576)
    """
    runtime.register()
    scalars.check_eps(eps)
    scalars.check_implementation(implementation)
    scalars.check_flag("return_q_norm", return_q_norm)
    arrays = {
        "qkv": qkv,
        "q_norm": q_norm,
        "kv_norm": kv_norm,
        "w_qb": w_qb,
        "w_uk": w_uk,
        "cache": cache,
        "slots": slots,
        "q_scale": _scale("q_scale", q_scale),
        "k_scale": _scale("k_scale", k_scale),
    }
    if rope is not None:
        arrays |= _rope_arrays(rope)
    form = rules.form_of(
        arrays,
        style=None if rope is None else rope.style,
        q_dtype=scalars.dtype_name("q_dtype", q_dtype),
        q_latent=return_q_norm,
    )
    if form.q_dtype != formats.E4M3.dtype:
        scalars.check_unscaled("q_scale", q_scale, f"{form.q_dtype} queries")
    if form.cache != formats.E4M3:
        scalars.check_unscaled("k_scale", k_scale, f"{form.cache.name} cache rows")
    if mailbox is not None:
        _check_mailbox(mailbox, dcp_axis if axes is None else getattr(axes, "dcp", None))
    options = {"eps": float(eps), "implementation": implementation, "mailbox": mailbox}
    if axes is None:
        return sharding.on_device(arrays, form, dcp_axis=dcp_axis, **options)
    if not isinstance(axes, MeshAxes):
        raise TypeError(
            f"axes must be jax_mla.MeshAxes, got {type(axes).__name__}."
            " Name the mesh axes: jax_mla.MeshAxes(batch=..., heads=..., dcp=...)."
        )
    if dcp_axis is not None:
        raise ValueError(
            f"dcp_axis must be None where axes are given, got {dcp_axis!r}."
            " Name the axis in MeshAxes(dcp=...)."
        )
    return sharding.on_mesh(arrays, form, axes, **options)


def _check_mailbox(mailbox: Any, dcp_axis: str | None) -> None:
    if not isinstance(mailbox, DcpMailbox):
        raise TypeError(
            f"mailbox must be a jax_mla.DcpMailbox, got {type(mailbox).__name__}."
            " Make one at start: jax_mla.DcpMailbox(mesh, axis, max_batch=..., heads=...)."
        )
    if dcp_axis is None:
        raise ValueError(
            "mailbox must come with the mesh axis over which queries are gathered, got none."
            " Name it: axes=jax_mla.MeshAxes(dcp=...), or dcp_axis inside jax.shard_map."
        )


def _rope_arrays(rope: Any) -> dict[str, Any]:
    if not isinstance(rope, Rope):
        raise TypeError(
            f"rope must be a jax_mla.Rope, got {type(rope).__name__}."
            " Make one: jax_mla.Rope.yarn(...).at(positions)."
        )
    return {"cos_sin": rope.cos_sin, "positions": rope.positions}


def _scale(name: str, value: Any) -> Any:
    """Returns a scale as a float32 scalar where it is one or a Python number, else as it came."""
    if isinstance(value, numbers.Real):
        return np.float32(scalars.check_scale(name, value))
    if getattr(value, "weak_type", False):  # a Python number that became a tracer
        return jax.lax.convert_element_type(value, np.float32)
    return value


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """Returns what `jax.export.export` needs as `disabled_checks` to accept the custom call.

    A program exported with it runs where the same interface version of jax_mla is imported.
    Export a program for several devices for one platform at a time: XLA compiles what it holds for
    the others too, and does not find the kernel there.

    Example:
        >>> import jax, jax_mla
        >>> checks = jax_mla.export_checks()
        >>> export = jax.export.export(jax.jit(jax_mla.q_absorb), disabled_checks=checks)
    """
    targets = (runtime.TARGET, runtime.EXCHANGE_TARGET)
    return [jax.export.DisabledSafetyCheck.custom_call(target) for target in targets]


def supported(
    device: jax.Device | None = None,
    *,
    rope: bool = False,
    cache: str = "e4m3",
    q_dtype: Any = None,
    return_q_norm: bool = False,
    model: str = "DeepSeek",
) -> str | None:
    """Returns why "auto" uses the reference for calls on a device, or None when it uses a kernel.

    Args:
        device: of this process; None for the default one.
        rope: whether the calls rotate.
        cache: format of their cache rows, "e4m3", "bf16" or "fp8_ds_mla".
        q_dtype: of their queries, as for `q_absorb`.
        return_q_norm: whether they return the query latent.
        model: whose sizes they have, "DeepSeek" (Kimi and LongCat too), "GLM-5", "GLM-4.7-Flash",
            "Mistral-4" or "MiniCPM3".

    Raises:
        ValueError: there is no such format or model, or no such queries with such a cache.
        jax_mla.SetupError: the device is an NVIDIA GPU, but driver or cuda-python cannot be used.
    """
    stored = scalars.named("cache", cache, formats.CACHE_FORMATS)
    dtype = scalars.dtype_name("q_dtype", q_dtype)
    form = formats.Form(
        geometry=scalars.named("model", model, geometry.GEOMETRIES),
        cache=stored,
        q_dtype=rules.query_dtype(stored, dtype),
        style=formats.STYLES[0] if rope else None,
        q_latent=return_q_norm,
    )
    device = jax.local_devices()[0] if device is None else device
    if not isinstance(device, jax.Device):
        raise TypeError(
            f"device must be a jax.Device, got {type(device).__name__}. Pass one of jax.devices()."
        )
    if device.platform != "gpu":
        return f"{device} is no NVIDIA GPU: kernels are shipped for NVIDIA GPUs only."
    return (
        variants.unsupported_reason(form)
        or variants.unproven_reason(form)
        or runtime.unsupported_reason(device.local_hardware_id)
    )
