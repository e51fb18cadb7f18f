"""README.md's table of models: which of their calls a kernel serves, and whether a GPU ran it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from shapes import CHECKED_HEADS

from jax_mla.formats import CACHE_FORMATS, STYLES, CacheFormat, Form
from jax_mla.geometry import GEOMETRIES
from jax_mla.scalars import named
from jax_mla.variants import unproven_reason, unsupported_reason

GPUS = (1, 2, 4, 8, 16)
"""Sizes of tensor parallelism."""

HEADER = ("model", "GPUs", "heads on each", *(stored.name for stored in CACHE_FORMATS))


@dataclass(frozen=True, kw_only=True)
class Model:
    """A released model, as far as its calls differ from others'.

    Attributes:
        name: of the model.
        heads: of the whole model.
        geometry: name of its sizes.
        rotates: whether it has RoPE.
        q_latent: whether it takes the query latent too.
    """

    name: str
    heads: int
    geometry: str = "DeepSeek"
    rotates: bool = True
    q_latent: bool = False

    def form(self, cache: CacheFormat) -> Form:
        return Form(
            geometry=named("geometry", self.geometry, GEOMETRIES),
            cache=cache,
            q_dtype=cache.q_dtypes[0],
            style=STYLES[0] if self.rotates else None,
            q_latent=self.q_latent,
        )


MODELS = (
    Model(name="DeepSeek-V2, V3, R1, V3.1", heads=128),
    Model(name="DeepSeek-V3.2", heads=128, q_latent=True),
    Model(name="Kimi-K2", heads=64),
    Model(name="Kimi-K3", heads=96, rotates=False),
    Model(name="Kimi-K3 draft (DSpark)", heads=64),
    Model(name="LongCat-Flash", heads=64),
    Model(name="GLM-5", heads=64, geometry="GLM-5", q_latent=True),
    Model(name="GLM-4.7-Flash", heads=20, geometry="GLM-4.7-Flash"),
    Model(name="Mistral-Small-4", heads=32, geometry="Mistral-4"),
    Model(name="MiniCPM3-4B", heads=40, geometry="MiniCPM3"),
)


def state(form: Form, heads: int) -> str:
    """What a GPU does with a form at a number of heads."""
    if unsupported_reason(form):
        return "no"
    proven = unproven_reason(form) is None and heads in CHECKED_HEADS
    return "verified" if proven else "compiles"


def table() -> str:
    """A Markdown table; neighbouring numbers of GPUs with the same answers share a line."""
    lines = [HEADER, ["---"] * len(HEADER)]
    for model in MODELS:
        gpus = [count for count in GPUS if model.heads % count == 0]
        for states, same in groupby(gpus, key=lambda count: _states(model, count)):
            counts = list(same)
            heads = [model.heads // count for count in counts]
            lines.append([model.name, _listed(counts), _listed(heads), *states])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _states(model: Model, count: int) -> tuple[str, ...]:
    return tuple(state(model.form(cache), model.heads // count) for cache in CACHE_FORMATS)


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
