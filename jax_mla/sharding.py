"""Calls on a mesh: which axes split which argument, and the shard_map around the call.

The ranks of a decode-context parallel (dcp) group hold different heads and different pages. Each
computes its own heads of all the group's tokens, stores the tokens it owns, and gathers the heads
of the others, since attention needs every head on every rank's pages.
"""

import contextlib
import math
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_mla import checks, primitive, rules
from jax_mla.formats import Form
from jax_mla.primitive import AnyMesh

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PerArray(Generic[T]):
    """Something for each array argument of `jax_mla.q_absorb` and for its results.

    What is said of cache holds for the argument and for the result; cos_sin and positions are the
    arrays of its rope, q_latent is the third result.
    """

    qkv: T
    q_norm: T
    kv_norm: T
    w_qb: T
    w_uk: T
    cache: T
    slots: T
    cos_sin: T
    positions: T
    q: T
    q_latent: T


@dataclass(frozen=True, kw_only=True)
class MeshAxes:
    """Names of the mesh axes that a call on the arrays of a whole mesh is split over.

    Along axes that are not named here every device does the same.

    Attributes:
        batch: axis or axes over which tokens and their cache pages are split (data parallel).
        heads: axis or axes over which heads are split (tensor parallel).
        dcp: axis over which heads and pages are split and queries gathered (decode-context
            parallel). It splits heads and pages last: neighbouring heads are on its ranks.
        mesh: the mesh; None for the one in context (`jax.set_mesh`).

    Raises:
        TypeError: an axis is no name, or names are not in a tuple.
        ValueError: an axis is named twice.

    Example:
        >>> import jax, jax_mla
        >>> mesh = jax.make_mesh((1, 1, 1), ("data", "model", "context"))
        >>> axes = jax_mla.MeshAxes(batch="data", heads="model", dcp="context")
        >>> axes.specs(mesh).cache == jax.P(("data", "context"))
        True
    """

    batch: str | tuple[str, ...] | None = None
    heads: str | tuple[str, ...] | None = None
    dcp: str | None = None
    mesh: AnyMesh | None = None

    def __post_init__(self) -> None:
        one = () if self.dcp is None else (self.dcp,)
        named = (*_names(self.batch), *_names(self.heads), *one)
        for name in named:
            if not isinstance(name, str):
                raise TypeError(
                    f"MeshAxes must have names of mesh axes, got {name!r}."
                    " Pass strings; batch and heads may be tuples of them."
                )
        twice = sorted({name for name in named if named.count(name) > 1})
        if twice:
            raise ValueError(
                f"MeshAxes must name a mesh axis once, got {twice[0]!r} again."
                " Leave the dcp axis out of batch and heads: it is added to them as the last."
            )

    def specs(self, mesh: AnyMesh | None = None) -> PerArray[P]:
        """Returns how each array is split.

        Args:
            mesh: None for the one of these axes, else the one in context.

        Raises:
            ValueError: there is no mesh, or it has no axis of some name.
        """
        mesh = mesh or self.mesh_or_context()
        batch, heads, dcp = _names(self.batch), _names(self.heads), _names(self.dcp)
        for name in (*batch, *heads, *dcp):
            if name not in mesh.axis_names:
                raise ValueError(
                    f"MeshAxes must name axes of the mesh, {_listed(mesh.axis_names)}, got"
                    f" {name!r}. Leave out what the mesh does not split."
                )
        tokens, own_heads = P(_entry(batch)), P(_entry(heads + dcp))
        return PerArray(
            qkv=tokens,
            q_norm=P(),
            kv_norm=P(),
            w_qb=own_heads,
            w_uk=own_heads,
            cache=P(_entry(batch + dcp)),
            slots=P(self.dcp, _entry(batch)) if self.dcp else tokens,
            cos_sin=P(),
            positions=tokens,
            q=P(_entry(batch), _entry(heads)),
            q_latent=tokens,
        )

    def shardings(self, mesh: AnyMesh | None = None) -> PerArray[NamedSharding]:
        """Returns the same as `specs` in the form that jax.device_put and jax.jit take."""
        mesh = mesh or self.mesh_or_context()
        specs = vars(self.specs(mesh))
        return PerArray(**{name: NamedSharding(mesh, spec) for name, spec in specs.items()})

    def mesh_or_context(self) -> AnyMesh:
        """Returns the mesh of these axes, else the one in context; under jit without its devices.

        Raises:
            ValueError: there is neither.
        """
        if self.mesh is not None:
            return self.mesh
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            raise ValueError(
                "MeshAxes must have a mesh, got none in context."
                " Call under jax.set_mesh(mesh), or pass MeshAxes(mesh=mesh)."
            )
        with contextlib.suppress(ValueError):  # under jit
            if not (concrete := jax.sharding.get_mesh()).empty:
                return concrete
        return mesh


def on_mesh(
    arrays: dict[str, Any], form: Form, axes: MeshAxes, **options: Any
) -> tuple[jax.Array, ...]:
    """Returns the results of a call on the arrays of a whole mesh.

    Args:
        arrays: by the names of `primitive.OPERANDS` and, where rotated, `primitive.ROPE_OPERANDS`.
        form: what the call computes.
        axes: what the mesh splits.
        options: eps, implementation and mailbox, as for `jax_mla.q_absorb`.
    """
    if jax.sharding.get_abstract_mesh().manual_axes:
        raise ValueError(
            "axes must be given for the arrays of a whole mesh, got them inside jax.shard_map,"
            f" where arrays are a device's own. Pass dcp_axis={axes.dcp!r} there instead."
        )
    mesh = axes.mesh_or_context()
    specs = axes.specs(mesh)
    _check_sizes(arrays, form, axes, mesh)
    in_specs = {name: getattr(specs, name, P()) for name in arrays}
    laid_out = {name: _laid_out(name, x, in_specs[name], mesh) for name, x in arrays.items()}

    def local(arrays: dict[str, Any]) -> tuple[jax.Array, ...]:
        own_slots = arrays["slots"].reshape(-1)  # [1, B] where ranks have a row each
        return on_device(arrays | {"slots": own_slots}, form, dcp_axis=axes.dcp, **options)

    out_specs = (specs.q, specs.cache, specs.q_latent)[: 3 if form.q_latent else 2]
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(in_specs,), out_specs=out_specs)
    results: tuple[jax.Array, ...] = mapped(laid_out)
    return results


def on_device(
    arrays: dict[str, Any], form: Form, dcp_axis: str | None, **options: Any
) -> tuple[jax.Array, ...]:
    """Returns the results of a call on what one device holds, inside jax.shard_map or on no mesh.

    Args:
        arrays: by the names of `primitive.OPERANDS` and, where rotated, `primitive.ROPE_OPERANDS`.
        form: what the call computes.
        dcp_axis: mesh axis over which heads are gathered.
        options: eps, implementation and mailbox, as for `jax_mla.q_absorb`.
    """
    _check_context(dcp_axis)
    checks.report_dropped(arrays["slots"], rules.problem_of(arrays, form))
    return primitive.bind(arrays, form, dcp_axis=dcp_axis, **options)


def _check_context(dcp_axis: str | None) -> None:
    mesh = jax.sharding.get_abstract_mesh()
    manual = mesh.manual_axes
    automatic = [name for name in mesh.axis_names if name not in manual]
    if manual and automatic:
        raise ValueError(
            f"jax.shard_map around q_absorb must map all mesh axes, got {_listed(automatic)} left"
            " to the compiler, which would gather arrays unasked. Leave out axis_names."
        )
    if dcp_axis is not None and not manual:
        raise ValueError(
            f"dcp_axis must be an axis of the jax.shard_map around the call, got {dcp_axis!r}"
            f" outside of any. For arrays of a whole mesh pass axes=MeshAxes(dcp={dcp_axis!r})."
        )
    if dcp_axis is not None and dcp_axis not in manual:
        raise ValueError(
            f"dcp_axis must be one of the mesh axes {_listed(manual)}, got {dcp_axis!r}."
            " Name the one axis that splits heads last."
        )


def _check_sizes(arrays: dict[str, Any], form: Form, axes: MeshAxes, mesh: AnyMesh) -> None:
    """Checks that the arrays of the whole mesh fit together and can be shared out evenly."""
    if axes.dcp is not None:
        slots, ranks = arrays["slots"], mesh.shape[axes.dcp]
        rules.check_array("slots", slots)
        if len(slots.shape) != 2 or slots.shape[0] != ranks:
            raise ValueError(
                f"slots must be [D, B] with a row for each of the {ranks} ranks of mesh axis"
                f" {axes.dcp!r}, got {list(slots.shape)}. Use jax_mla.dcp.local_slots."
            )
        arrays = arrays | {"slots": jax.ShapeDtypeStruct(slots.shape[1:], slots.dtype)}
    problem = rules.problem_of(arrays, form)
    batch, heads, dcp = _names(axes.batch), _names(axes.heads), _names(axes.dcp)
    for name, unit, count, split, remedy in (
        ("qkv", "tokens", problem.batch, batch, "Pad the step with tokens of slot -1."),
        ("w_uk", "heads", problem.heads, heads + dcp, "Split heads over fewer devices."),
        ("cache", "pages", problem.pages, batch + dcp, "Round its pages up."),
    ):
        shares = math.prod(mesh.shape[axis] for axis in split)
        if count % shares:
            raise ValueError(
                f"{name} must have a multiple of {shares} {unit}, the size of mesh axes"
                f" {_listed(split)}, got {count}. {remedy}"
            )


def _laid_out(name: str, x: Any, spec: P, mesh: AnyMesh) -> Any:
    """Returns an array split by `spec`, which it is already or, whole on each device, becomes."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = {axis for axis, kind in kinds if kind == AxisType.Explicit}
    splitting = {axis for axis, size in mesh.shape.items() if size > 1}
    found = primitive.known_spec(x)
    # The type of a traced array tells of Explicit axes only.
    split, traced, concrete = (
        _by_dimension(entries, x.ndim, known)
        for entries, known in ((found, splitting), (spec, splitting & explicit), (spec, splitting))
    )
    if any(split) and split not in (traced, concrete):
        raise ValueError(
            f"{rules.label(name)} must be split as {spec}, got {found}: a step would have to move"
            f" it between devices. Place it once as axes.shardings().{name} says"
            f"{', which splits by dcp last' if len(spec) else ''}."
        )
    if not explicit:
        return x
    by_axis = (_entry(names) for names in _by_dimension(spec, x.ndim, explicit))
    return jax.reshard(x, NamedSharding(mesh, P(*by_axis)))


def _by_dimension(spec: P, rank: int, axes: set[str]) -> tuple[tuple[str, ...], ...]:
    """Returns which of `axes` split each dimension."""
    entries = (*spec, *[None] * (rank - len(spec)))
    return tuple(tuple(name for name in _names(entry) if name in axes) for entry in entries)


def _names(entry: Any) -> tuple[Any, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _entry(names: tuple[str, ...]) -> Any:
    return names[0] if len(names) == 1 else names or None


def _listed(names: Any) -> str:
    return ", ".join(map(repr, names))
