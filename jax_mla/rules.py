"""Geometry of the operation and the checks of its arguments.

Imports neither jax nor numpy: the kernel build reads the constants too.
"""

import math
import numbers
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

Q_RANK = 1536
"""Columns of the query latent."""
KV_RANK = 512
"""Columns of the KV latent, and of an absorbed query."""
NOPE = 128
"""Q_B rows of a head that W_UK absorbs."""
ROPE = 64
"""Q_B rows of a head, and columns of a key, that positions may rotate."""
HEAD_ROWS = NOPE + ROPE
"""Q_B rows of a head."""
ROW = KV_RANK + ROPE
"""Bytes of a query of one head and of a cache row."""
QKV_COLUMNS = Q_RANK + KV_RANK + ROPE
"""Columns of qkv that are read."""
MAX_HEADS = 128
MAX_BATCH = 4096
MAX_ROWS = 2**31 - 1
"""Cache rows that an int32 slot can name."""

IMPLEMENTATIONS = ("auto", "cuda", "reference")

_MIN_SCALE, _MAX_SCALE = 2.0**-126, 2.0**126
_MAX_FLOAT32 = (2 - 2.0**-23) * 2.0**127


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
    """

    batch: int
    heads: int
    pages: int
    page_size: int
    columns: int

    @property
    def rows(self) -> int:
        """Rows of the cache; slots from here on name none."""
        return self.pages * self.page_size

    @property
    def bytes_moved(self) -> int:
        """Bytes that the call must read and write when every token's row is stored."""
        weights = 2 * (Q_RANK + KV_RANK + self.heads * (HEAD_ROWS * Q_RANK + NOPE * KV_RANK))
        token = 2 * QKV_COLUMNS + 4 + self.heads * ROW + ROW
        return weights + self.batch * token

    @property
    def flops(self) -> int:
        """Floating-point operations of the two matrix products."""
        return 2 * self.batch * self.heads * (HEAD_ROWS * Q_RANK + NOPE * KV_RANK)


class _Rule(NamedTuple):
    dtype: str
    layout: str
    remedy: str


_RULES = {
    "qkv": _Rule(
        "bfloat16",
        "[B, W]",
        f"Concatenate query latent ({Q_RANK}), KV latent ({KV_RANK}) and k_pe ({ROPE}).",
    ),
    "q_norm": _Rule("bfloat16", "[1536]", "Pass the weight of q_a_layernorm."),
    "kv_norm": _Rule("bfloat16", "[512]", "Pass the weight of kv_a_layernorm."),
    "w_qb": _Rule(
        "bfloat16",
        "[H * 192, 1536] with H as in w_uk",
        "Pass q_b_proj.weight of the same heads, not transposed.",
    ),
    "w_uk": _Rule(
        "bfloat16",
        "[H, 128, 512]",
        "Pass the 128 key rows of each head in kv_b_proj.weight.",
    ),
    "cache": _Rule(
        "float8_e4m3fn",
        "[P, S, 576]",
        "Make it with jnp.zeros((P, S, 576), jnp.float8_e4m3fn).",
    ),
    "slots": _Rule(
        "int32",
        "[B] with B as in qkv",
        "Use -1 for a token whose cache row must not be written.",
    ),
    "q_scale": _Rule("float32", "a scalar, []", "One scale serves all heads and tokens."),
    "k_scale": _Rule("float32", "a scalar, []", "One scale serves the whole cache."),
}


def problem_of(
    qkv: Array,
    q_norm: Array,
    kv_norm: Array,
    w_qb: Array,
    w_uk: Array,
    cache: Array,
    slots: Array,
    q_scale: Array,
    k_scale: Array,
) -> Problem:
    """Returns the sizes of a call whose arguments fit together.

    Args:
        qkv, q_norm, kv_norm, w_qb, w_uk, cache, slots: as for `jax_mla.q_absorb`.
        q_scale, k_scale: [] float32.

    Raises:
        TypeError: an argument is no array or has the wrong dtype.
        ValueError: an argument has the wrong shape.
    """
    operands = (qkv, q_norm, kv_norm, w_qb, w_uk, cache, slots, q_scale, k_scale)
    arguments = dict(zip(_RULES, operands, strict=True))
    for name, value in arguments.items():
        check_array(name, value)
    for name, rank in (("qkv", 2), ("w_uk", 3), ("cache", 3)):
        if len(arguments[name].shape) != rank:
            raise _shape_error(name, arguments[name])
    problem = Problem(
        batch=qkv.shape[0],
        heads=w_uk.shape[0],
        pages=cache.shape[0],
        page_size=cache.shape[1],
        columns=qkv.shape[1],
    )
    if problem.columns < QKV_COLUMNS:
        raise ValueError(
            f"qkv must have at least {QKV_COLUMNS} columns, got {problem.columns}."
            f" {_RULES['qkv'].remedy}"
        )
    for name, shape in _shapes(problem).items():
        if tuple(arguments[name].shape) != shape:
            raise _shape_error(name, arguments[name], list(shape))
    return problem


def _shapes(problem: Problem) -> dict[str, tuple[int, ...]]:
    return {
        "q_norm": (Q_RANK,),
        "kv_norm": (KV_RANK,),
        "w_uk": (problem.heads, NOPE, KV_RANK),
        "w_qb": (problem.heads * HEAD_ROWS, Q_RANK),
        "cache": (problem.pages, problem.page_size, ROW),
        "slots": (problem.batch,),
        "q_scale": (),
        "k_scale": (),
    }


def check_array(name: str, value: Array) -> None:
    dtype = _RULES[name].dtype
    if not (hasattr(value, "dtype") and hasattr(value, "shape")):
        raise TypeError(
            f"{name} must be an array of {dtype}, got {type(value).__name__}."
            f" Convert it: jnp.asarray({name}, jnp.{dtype})."
        )
    found = getattr(value.dtype, "name", value.dtype)  # other libraries' dtypes have no name
    if found != dtype:
        raise TypeError(
            f"{name} must have dtype {dtype}, got {found}."
            f" Convert it where it is made: {_conversion(name, found)}."
        )
    if not all(isinstance(size, int) for size in value.shape):
        raise TypeError(
            f"{name} must have a shape of plain integers, got {list(value.shape)}."
            " Trace one program for each shape: the kernel is chosen by batch and heads."
        )


def _conversion(name: str, found: str) -> str:
    dtype = f"jnp.{_RULES[name].dtype}"
    if name == "cache" and found in ("uint8", "int8"):  # holds e4m3 bytes, not numbers
        return f"jax.lax.bitcast_convert_type(cache, {dtype})"
    return f"{name}.astype({dtype})"


def _shape_error(name: str, value: Array, expected: list[int] | None = None) -> ValueError:
    rule = _RULES[name]
    known = expected is None or str(expected) in rule.layout
    sizes = "" if known else f" = {expected}"
    return ValueError(
        f"{name} must be {rule.layout}{sizes}, got {list(value.shape)}. {rule.remedy}"
    )


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
            f"cache must have pages of at least 1 row, got [P, S, {ROW}] ="
            f" [{problem.pages}, {problem.page_size}, {ROW}]. Give pages a size."
        )
    if problem.rows > MAX_ROWS:
        raise ValueError(
            f"cache must have at most {MAX_ROWS} rows on a device, which int32 slots can name,"
            f" got {problem.pages} * {problem.page_size}. Use a cache for each layer."
        )


def check_scale(name: str, scale: float | numbers.Real) -> float:
    """Returns a dequantisation scale that is known while tracing.

    Raises:
        ValueError: it is not finite and positive, or it or its reciprocal is no normal float32.
    """
    scale = _nearest_float(scale)
    if not _MIN_SCALE <= scale <= _MAX_SCALE:
        raise ValueError(
            f"{name} must be finite and positive, 2**-126 to 2**126, got {scale}."
            " Pass the scale that turns stored bytes back into values; 1.0 for none."
        )
    return scale


def _nearest_float(number: float | numbers.Real) -> float:
    """Returns the float that Python's conversion gives, and infinity where that overflows."""
    try:
        return float(number)
    except OverflowError:
        return -math.inf if number < 0 else math.inf


def check_eps(eps: float) -> None:
    """Checks the epsilon of the norms.

    Raises:
        TypeError: it is no Python number.
        ValueError: it is negative or not finite in float32.
    """
    if not isinstance(eps, numbers.Real):
        raise TypeError(
            f"eps must be a Python float, got {type(eps).__name__}."
            " It is compiled into the program: take it from the model's configuration."
        )
    value = _nearest_float(eps)
    if not 0 <= value <= _MAX_FLOAT32:
        raise ValueError(
            f"eps must be finite and at least 0, got {value}. Use the model's rms_norm_eps."
        )


def check_implementation(implementation: str) -> None:
    """Checks the name of an implementation.

    Raises:
        ValueError: there is none of that name.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}."
            ' Leave it out for "auto".'
        )
