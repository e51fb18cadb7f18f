"""Rotary position embedding: the table of cosines and sines, and the positions of one step."""

import dataclasses
import json
import math
import numbers
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jax_mla import hf_config
from jax_mla.formats import STYLES

Doubles = npt.NDArray[np.float64]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Rope:
    """How `jax_mla.q_absorb` rotates the rope columns of queries and keys.

    A pair (x0, x1) of columns at position p becomes (x0 cos - x1 sin, x1 cos + x0 sin), with pair
    i's cosine and sine from row p. It is a pytree whose style is static: pass it to a jitted
    function as an argument, so that the table is no constant of the program.

    Attributes:
        cos_sin: [M, R] float32, a row for each position: cosines in the first R/2 columns, sines in
            the others. M is at least 1; R is the model's `qk_rope_head_dim`, 64 in most.
        positions: [B] int32, of each token of the step. One outside of the table counts as the
            nearest one in it. None until `at` gives them.
        style: "interleaved" (GPT-J; DeepSeek, Kimi, LongCat, GLM) pairs columns 2i and 2i + 1,
            "half" (NeoX; MiniCPM3) columns i and i + R/2.

    Raises:
        ValueError: there is no such style.

    Example:
        >>> import jax, jax.numpy as jnp, jax_mla
        >>> rope = jax_mla.Rope.yarn(max_positions=8192, factor=40, original_max_positions=4096)
        >>> rope.cos_sin.shape
        (8192, 64)
        >>> step = rope.at(jnp.array([17, 4711], jnp.int32))
    """

    cos_sin: jax.Array | npt.NDArray[np.float32]
    positions: jax.Array | npt.NDArray[np.int32] | None = None
    style: str = dataclasses.field(default="interleaved", metadata={"static": True})

    def __post_init__(self) -> None:
        # The arrays stay unchecked: transformations build pytrees with other leaves.
        if self.style not in STYLES:
            raise ValueError(
                f"rope's style must be one of {', '.join(STYLES)}, got {self.style!r}."
                ' DeepSeek, Kimi and LongCat are "interleaved".'
            )

    def at(self, positions: jax.Array | npt.NDArray[np.int32]) -> "Rope":
        """Returns the same table for the tokens of one step, positions [B] int32."""
        return dataclasses.replace(self, positions=positions)

    @classmethod
    def default(
        cls,
        *,
        max_positions: int,
        theta: float = 10000.0,
        dim: int = 64,
        style: str = "interleaved",
    ) -> "Rope":
        """Returns an unscaled table: pair i turns by theta**(-2i / dim) a position.

        Built in float64, then rounded. The formula is RoFormer's (arXiv 2104.09864, 3.2.2).

        Args:
            max_positions: M, rows of the table; positions from here on count as the last one.
            theta: `rope_theta` of the model's configuration.
            dim: R, columns that rotate.
            style: "interleaved" or "half".

        Raises:
            ValueError: a number is out of range, or there is no such style.
        """
        return cls(_table(_frequencies(theta, dim), max_positions), style=style)

    @classmethod
    def yarn(
        cls,
        *,
        max_positions: int,
        factor: float,
        original_max_positions: int,
        theta: float = 10000.0,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        mscale: float = 1.0,
        mscale_all_dim: float = 1.0,
        dim: int = 64,
        style: str = "interleaved",
    ) -> "Rope":
        """Returns a table for a context that YaRN made `factor` times longer.

        Pairs that turn more than `beta_fast` times in the original context keep their frequency,
        pairs that turn less than `beta_slow` times have it divided by `factor`, those between get
        a mixture. Cosines and sines carry yarn_mscale(factor, mscale) / yarn_mscale(factor,
        mscale_all_dim), which is 1 in DeepSeek's and Kimi's models; their softmax scale carries
        yarn_mscale(factor, mscale_all_dim)**2 (`jax_mla.weights.Layer.softmax_scale` does). Built
        in float64, then rounded. The formulas are YaRN's (arXiv 2309.00071, 3.2 to 3.4) as in
        DeepSeek-V3's inference/model.py and modeling_deepseek.py.

        Args:
            max_positions: M, rows of the table; positions from here on count as the last one.
            factor: how much longer, at least 1.
            original_max_positions: `original_max_position_embeddings`, the context that the model
                was trained with before.
            theta: `rope_theta` of the model's configuration.
            beta_fast, beta_slow: turns in the original context. Kimi-K2 has 1 for both.
            mscale, mscale_all_dim: as in the configuration. One that has none means 1 and 0.
            dim: R, columns that rotate.
            style: "interleaved" or "half".

        Raises:
            ValueError: a number is out of range, or there is no such style.
        """
        _check("factor", factor, 1)
        _check("mscale", mscale, 0)
        _check("mscale_all_dim", mscale_all_dim, 0)
        _check("original_max_positions", original_max_positions, 1)
        _check("beta_slow", beta_slow, 0, above=True)
        _check("beta_fast", beta_fast, beta_slow)
        kept = _frequencies(theta, dim)
        low = _pair_that_turns(beta_fast, original_max_positions, theta, dim)
        high = _pair_that_turns(beta_slow, original_max_positions, theta, dim)
        divided = _ramp(max(math.floor(low), 0), min(math.ceil(high), dim - 1), dim // 2)
        frequencies = kept / factor * divided + kept * (1 - divided)
        ratio = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
        return cls(_table(frequencies, max_positions, ratio), style=style)

    @classmethod
    def from_hf(
        cls,
        config: hf_config.Config,
        *,
        max_positions: int | None = None,
        style: str | None = None,
    ) -> "Rope":
        """Returns the table that a model's configuration asks for.

        Args:
            config: the parsed config.json, or an object with its fields as attributes.
            max_positions: M, rows of the table; None for the model's `max_position_embeddings`
                (DeepSeek-V3's 163840 rows of float32 take 42 MB).
            style: None for "half" where the configuration says `rope_interleave: false` or is
                MiniCPM3's, else "interleaved".

        Raises:
            ValueError: a field is missing, the model does not rotate (Kimi-K3), or scales its
                positions in a way that `default` and `yarn` do not build.
        """
        config = hf_config.text_part(config)
        if hf_config.optional(config, "mla_use_nope", False):
            raise ValueError(
                "config must be of a model that rotates, got mla_use_nope = True."
                " Leave rope out of jax_mla.q_absorb."
            )
        given = hf_config.rope_parameters(config)
        theta = hf_config.required(given, "rope_theta", "Pass the model's own config.json.")
        dim = hf_config.required(config, "qk_rope_head_dim", "Pass the config of an MLA model.")
        if max_positions is None:
            remedy = "Pass max_positions=."
            max_positions = int(hf_config.required(config, "max_position_embeddings", remedy))
        common: dict[str, Any] = {
            "max_positions": max_positions,
            "theta": theta,
            "dim": dim,
            "style": style or _style(config),
        }
        if given["rope_type"] == "default":
            return cls.default(**common)
        return cls.yarn(**common, **_yarn_options(given))


# Programs with a Rope among their arguments can then be exported and saved.
jax.export.register_pytree_node_serialization(
    Rope,
    serialized_name="jax_mla.Rope",
    serialize_auxdata=lambda static: json.dumps(static).encode(),
    deserialize_auxdata=lambda text: tuple(json.loads(text)),
)


def yarn_mscale(factor: float, weight: float) -> float:
    """Returns 0.1 * weight * ln(factor) + 1, and 1 where nothing is scaled.

    YaRN's correction of the attention logits (arXiv 2309.00071, 3.4), with the weights that
    DeepSeek's modeling_deepseek.py added.
    """
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def _style(config: hf_config.Config) -> str:
    is_half = hf_config.optional(config, "model_type") == "minicpm3"
    return "interleaved" if hf_config.optional(config, "rope_interleave", not is_half) else "half"


def _yarn_options(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of `Rope.yarn` that a configuration gives."""
    kind = given["rope_type"]
    if kind not in hf_config.DEEPSEEK_YARN:
        raise ValueError(
            f"config's rope_type must be default or yarn, got {kind!r}."
            " Build the table yourself: jax_mla.Rope(cos_sin)."
        )
    unknown = {"attention_factor": None, "truncate": True}
    for name, usual in unknown.items():
        if given.get(name, usual) != usual:
            raise ValueError(
                f"config's {name} must be left out or {usual}, got {given[name]}."
                " Build the table yourself: jax_mla.Rope(cos_sin)."
            )
    remedy = "YaRN needs it: pass the model's own config.json."
    original = hf_config.required(given, "original_max_position_embeddings", remedy)
    return {
        "factor": hf_config.required(given, "factor", remedy),
        "original_max_positions": original,
        "beta_fast": hf_config.optional(given, "beta_fast", 32.0),
        "beta_slow": hf_config.optional(given, "beta_slow", 1.0),
        "mscale": hf_config.optional(given, "mscale", 1.0),
        "mscale_all_dim": hf_config.optional(given, "mscale_all_dim", 0.0),
    }


def _frequencies(theta: float, dim: int) -> Doubles:
    """Returns the radians [dim / 2] that each pair turns in a position."""
    _check("theta", theta, 1, above=True)
    _check_count("dim", dim)
    if dim % 2:
        raise ValueError(f"dim must be even, got {dim}. Columns rotate in pairs.")
    exponents: Doubles = -np.arange(0, dim, 2, dtype=np.float64) / dim
    return np.power(float(theta), exponents)


def _pair_that_turns(turns: float, positions: int, theta: float, dim: int) -> float:
    """Returns the index, a fraction, of the pair that turns so often in so many positions."""
    return dim * math.log(positions / (turns * 2 * math.pi)) / (2 * math.log(theta))


def _ramp(low: float, high: float, count: int) -> Doubles:
    """Returns what is 0 up to index `low`, 1 from `high` on and linear between."""
    if low == high:
        high += 0.001  # the models' own way to a step
    rising: Doubles = np.clip((np.arange(count) - low) / (high - low), 0, 1)
    return rising


def _table(frequencies: Doubles, max_positions: int, factor: float = 1.0) -> jax.Array:
    _check_count("max_positions", max_positions)
    angles = np.arange(max_positions, dtype=np.float64)[:, None] * frequencies
    table = np.empty((max_positions, 2 * len(frequencies)), np.float32)
    table[:, : len(frequencies)] = factor * np.cos(angles)
    table[:, len(frequencies) :] = factor * np.sin(angles)
    return jnp.asarray(table)


def _check(name: str, value: float, least: float, *, above: bool = False) -> None:
    found = isinstance(value, numbers.Real) and math.isfinite(value)
    if not (found and (value > least if above else value >= least)):
        bound = "above" if above else "at least"
        raise ValueError(
            f"{name} must be a finite number {bound} {least:g}, got {value!r}."
            " Take it from the model's config."
        )


def _check_count(name: str, value: int) -> None:
    if not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(
            f"{name} must be an integer of at least 1, got {value!r}."
            " Take it from the model's config."
        )
