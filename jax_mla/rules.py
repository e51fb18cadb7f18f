"""The checks of a call's arguments, and its sizes.

Imports neither jax nor numpy: the kernel build reads the constants too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from jax_mla.formats import BF16, CACHE_FORMATS, E4M3, FP8_DS_MLA, PLAIN, CacheFormat, Form
from jax_mla.geometry import DEEPSEEK, Geometry, nearest_geometry

# Sizes of the geometry that the kernels are compiled for.
Q_RANK, KV_RANK, NOPE, ROPE = DEEPSEEK.q_rank, DEEPSEEK.kv_rank, DEEPSEEK.nope, DEEPSEEK.rope
HEAD_ROWS, ROW, QKV_COLUMNS = DEEPSEEK.head_rows, DEEPSEEK.row, DEEPSEEK.qkv_columns

MAX_HEADS = 128
MAX_BATCH = 4096
MAX_ROWS = 2**31 - 1
"""Cache rows that an int32 slot can name."""


class Array(Protocol):
    """Anything with a shape and a dtype: jax and numpy arrays, tracers, ShapeDtypeStruct."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Sizes of one call, of what one device holds or of what a mesh holds together.

    Attributes:
        batch: B, tokens of the step.
        heads: H.
        pages: P, pages of the cache.
        page_size: S, rows of a page.
        columns: W, elements from one row of qkv to the next.
        form: what the call computes.
    """

    batch: int
    heads: int
    pages: int
    page_size: int
    columns: int
    form: Form = PLAIN

    @property
    def rows(self) -> int:
        """Rows of the cache; slots from here on name none."""
        return self.pages * self.page_size

    @property
    def bytes_moved(self) -> int:
        """Bytes that the call must read and write when every token's row is stored."""
        form, size = self.form, self.form.geometry
        weights = 2 * (size.q_rank + size.kv_rank + self.heads * self._head_weights)
        token = 2 * size.qkv_columns + 4 + self.heads * form.q_bytes
        token += form.cache.row_bytes(size)
        if form.style:
            token += 4 * size.rope + 4
        if form.q_latent:
            token += 2 * size.q_rank
        return weights + self.batch * token

    @property
    def flops(self) -> int:
        """Floating-point operations of the two matrix products."""
        return 2 * self.batch * self.heads * self._head_weights

    @property
    def _head_weights(self) -> int:
        size = self.form.geometry
        return size.head_rows * size.q_rank + size.nope * size.kv_rank


class _Rule(NamedTuple):
    """What an array must be; `layout` and `remedy` have the names of Geometry in braces."""

    dtype: str
    layout: str
    remedy: str


_RULES = {
    "qkv": _Rule(
        "bfloat16",
        "[B, W]",
        "Concatenate query latent ({q_rank}), KV latent ({kv_rank}) and k_pe ({rope}).",
    ),
    "q_norm": _Rule("bfloat16", "[{q_rank}]", "Pass the weight of q_a_layernorm."),
    "kv_norm": _Rule("bfloat16", "[{kv_rank}]", "Pass the weight of kv_a_layernorm."),
    "w_qb": _Rule(
        "bfloat16",
        "[H * {head_rows}, {q_rank}] with H as in w_uk",
        "Pass q_b_proj.weight of the same heads, not transposed.",
    ),
    "w_uk": _Rule(
        "bfloat16",
        "[H, {nope}, {kv_rank}]",
        "Pass the {nope} key rows of each head in kv_b_proj.weight.",
    ),
    "cache": _Rule(
        "float8_e4m3fn",
        "[P, S, {columns}]",
        "Make it with jnp.zeros((P, S, {columns}), jnp.{dtype}).",
    ),
    "slots": _Rule(
        "int32",
        "[B] with B as in qkv",
        "Use -1 for a token whose cache row must not be written.",
    ),
    "q_scale": _Rule("float32", "a scalar, []", "One scale serves all heads and tokens."),
    "k_scale": _Rule("float32", "a scalar, []", "One scale serves the whole cache."),
    "cos_sin": _Rule(
        "float32",
        "[M, {rope}] with a row for each position",
        "Make it with jax_mla.Rope.yarn or Rope.default, dim={rope}.",
    ),
    "positions": _Rule(
        "int32",
        "[B] with B as in qkv",
        "Pass each token's position: rope.at(positions).",
    ),
}
_LABELS = {"cos_sin": "rope.cos_sin", "positions": "rope.positions"}


def label(name: str) -> str:
    """Returns what users call an array."""
    return _LABELS.get(name, name)


def form_of(
    arrays: Mapping[str, Any],
    *,
    style: str | None = None,
    q_dtype: str | None = None,
    q_latent: bool = False,
) -> Form:
    """Returns what a call computes. Arrays that fit no form are left for `problem_of` to refuse.

    Args:
        arrays: by the names of the arguments of `jax_mla.q_absorb`.
        style: of RoPE, None for NoPE.
        q_dtype: name of the queries' dtype, None for the one that fits the cache.
        q_latent: whether the normalised query latent is returned.

    Raises:
        ValueError: attention does not take such queries and rows.
    """
    shapes = {name: tuple(getattr(array, "shape", ())) for name, array in arrays.items()}
    geometry = nearest_geometry(
        q_ranks=shapes["w_qb"][1:2] + shapes["q_norm"][:1],
        kv_ranks=shapes["w_uk"][2:3] + shapes["kv_norm"][:1],
        nopes=shapes["w_uk"][1:2],
    )
    stored = _cache_format(arrays["cache"], geometry)
    return Form(
        geometry=geometry,
        cache=stored,
        q_dtype=query_dtype(stored, q_dtype),
        style=style,
        q_latent=q_latent,
    )


def query_dtype(cache: CacheFormat, q_dtype: str | None) -> str:
    """Returns the dtype of queries over a cache, the default one for None.

    Raises:
        ValueError: attention does not take such queries and rows.
    """
    if q_dtype is not None and q_dtype not in cache.q_dtypes:
        raise ValueError(
            f"q_dtype must be {' or '.join(cache.q_dtypes)} with {cache.name} cache rows, got"
            f" {q_dtype}. Leave it out for {cache.q_dtypes[0]}."
        )
    return q_dtype or cache.q_dtypes[0]


def _cache_format(cache: Any, geometry: Geometry) -> CacheFormat:
    dtype = _dtype_name(cache)
    if dtype == FP8_DS_MLA.dtype and tuple(cache.shape[2:]) == (geometry.row,):
        return E4M3  # bytes of e4m3: the message about the dtype says what to do
    return next((format_ for format_ in CACHE_FORMATS if format_.dtype == dtype), E4M3)


def _dtype_name(value: Any) -> Any:
    dtype = getattr(value, "dtype", None)
    return getattr(dtype, "name", dtype)  # other libraries' dtypes have no name


def problem_of(arrays: Mapping[str, Array], form: Form) -> Problem:
    """Returns the sizes of a call whose arguments fit together.

    Args:
        arrays: by the names of the arguments of `jax_mla.q_absorb`; q_scale and k_scale [] float32;
            cos_sin and positions of its rope where `form` has a style.
        form: what the call computes.

    Raises:
        TypeError: an argument is no array or has the wrong dtype.
        ValueError: an argument has the wrong shape.
    """
    for name in arrays:
        check_array(name, arrays[name], form)
    for name, rank in (("qkv", 2), ("w_uk", 3), ("cache", 3), ("cos_sin", 2)):
        if name in arrays and len(arrays[name].shape) != rank:
            raise _shape_error(name, arrays[name], form)
    problem = Problem(
        batch=arrays["qkv"].shape[0],
        heads=arrays["w_uk"].shape[0],
        pages=arrays["cache"].shape[0],
        page_size=arrays["cache"].shape[1],
        columns=arrays["qkv"].shape[1],
        form=form,
    )
    if problem.columns < form.geometry.qkv_columns:
        raise ValueError(
            f"qkv must have at least {form.geometry.qkv_columns} columns, got {problem.columns}."
            f" {_filled(_RULES['qkv'].remedy, form)}"
        )
    for name, shape in _shapes(problem, arrays).items():
        if tuple(arrays[name].shape) != shape:
            raise _shape_error(name, arrays[name], form, list(shape))
    return problem


def _shapes(problem: Problem, arrays: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
    size = problem.form.geometry
    shapes: dict[str, tuple[int, ...]] = {
        "q_norm": (size.q_rank,),
        "kv_norm": (size.kv_rank,),
        "w_uk": (problem.heads, size.nope, size.kv_rank),
        "w_qb": (problem.heads * size.head_rows, size.q_rank),
        "cache": (problem.pages, problem.page_size, problem.form.cache.columns(size)),
        "slots": (problem.batch,),
        "q_scale": (),
        "k_scale": (),
    }
    if "cos_sin" in arrays:
        table_rows = max(arrays["cos_sin"].shape[0], 1)
        shapes |= {"cos_sin": (table_rows, size.rope), "positions": (problem.batch,)}
    return shapes


def check_array(name: str, value: Array, form: Form = PLAIN) -> None:
    """Checks that an argument is an array of the right dtype and of a known shape.

    Raises:
        TypeError: it is not.
    """
    shown = label(name)
    dtype = form.cache.dtype if name == "cache" else _RULES[name].dtype
    if not (hasattr(value, "dtype") and hasattr(value, "shape")):
        convert = f"Convert it: jnp.asarray({name}, jnp.{dtype})."
        raise TypeError(
            f"{shown} must be an array of {dtype}, got {type(value).__name__}."
            f" {convert if shown == name else _filled(_RULES[name].remedy, form)}"
        )
    found = _dtype_name(value)
    if found != dtype:
        others = f" (or {BF16.dtype}, or {FP8_DS_MLA.dtype} rows of fp8_ds_mla)"
        raise TypeError(
            f"{shown} must have dtype {dtype}{others if name == 'cache' else ''}, got {found}."
            f" Convert it where it is made: {_conversion(name, dtype, found)}."
        )
    if not all(isinstance(size, int) for size in value.shape):
        raise TypeError(
            f"{shown} must have a shape of plain integers, got {list(value.shape)}."
            " Trace one program for each shape: the kernel is chosen by batch and heads."
        )


def _conversion(name: str, dtype: str, found: str) -> str:
    if name == "cache" and found in ("uint8", "int8"):  # holds e4m3 bytes, not numbers
        return f"jax.lax.bitcast_convert_type(cache, jnp.{dtype})"
    return f"{name}.astype(jnp.{dtype})"


def _filled(text: str, form: Form) -> str:
    size = form.geometry
    return text.format(
        q_rank=size.q_rank,
        kv_rank=size.kv_rank,
        nope=size.nope,
        rope=size.rope,
        head_rows=size.head_rows,
        columns=form.cache.columns(size),
        dtype=form.cache.dtype,
    )


def _shape_error(
    name: str, value: Array, form: Form, expected: list[int] | None = None
) -> ValueError:
    layout, remedy = (_filled(text, form) for text in _RULES[name][1:])
    known = expected is None or str(expected) in layout
    sizes = "" if known else f" = {expected}"
    return ValueError(f"{label(name)} must be {layout}{sizes}, got {list(value.shape)}. {remedy}")


def check_limits(problem: Problem) -> None:
    """Checks that one device can do a call.

    Raises:
        ValueError: it has too many tokens, heads or cache rows, or no heads or rows of a page.
    """
    if problem.batch > MAX_BATCH:
        raise ValueError(
            f"qkv must have at most {MAX_BATCH} rows (tokens) on a device, got {problem.batch}."
            " Split the batch into several calls."
        )
    if not 1 <= problem.heads <= MAX_HEADS:
        raise ValueError(
            f"w_uk must have 1 to {MAX_HEADS} heads on a device, got {problem.heads}."
            " Split w_uk and w_qb by heads into several calls, or over more devices."
        )
    if problem.page_size < 1:
        raise ValueError(
            "cache must have pages of at least 1 row, got P, S ="
            f" {problem.pages}, {problem.page_size}. Give pages a size."
        )
    if problem.rows > MAX_ROWS:
        raise ValueError(
            f"cache must have at most {MAX_ROWS} rows on a device, which int32 slots can name,"
            f" got {problem.pages} * {problem.page_size}. Use a cache for each layer."
        )
