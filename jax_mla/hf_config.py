"""What a model's configuration (config.json of a Hugging Face checkpoint) says about attention."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_mla.errors import UnsupportedError
from jax_mla.geometry import GEOMETRIES, Geometry

Config = Mapping[str, Any] | object
"""The parsed config.json, or an object with its fields as attributes."""

DEEPSEEK_YARN = ("yarn", "deepseek_yarn")
"""Names of the RoPE scaling that DeepSeek's models use."""


def text_part(config: Config) -> Config:
    """Returns the language model's fields of a configuration that nests them, else all of it.

    Raises:
        TypeError: it is text, a path or None.
    """
    if config is None or isinstance(config, str | Path):
        raise TypeError(
            f"config must be the parsed config.json, got {type(config).__name__}."
            " Pass json.loads(path.read_text())."
        )
    part: Config = optional(config, "text_config", config)
    return part


def optional(config: Config, name: str, default: Any = None) -> Any:
    """Returns a field, and the default where it is missing or null."""
    value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return default if value is None else value


def required(config: Config, name: str, remedy: str) -> Any:
    """Returns a field.

    Raises:
        ValueError: it is missing or null.
    """
    value = optional(config, name)
    if value is None:
        raise ValueError(f"config must have {name}, got none. {remedy}")
    return value


def rope_parameters(config: Config) -> dict[str, Any]:
    """Returns the fields that say how positions rotate.

    Older files name them `rope_scaling` and keep `rope_theta` beside them, newer ones
    `rope_parameters`. `rope_type` is "default" where nothing is scaled.
    """
    found = {**optional(config, "rope_scaling", {}), **optional(config, "rope_parameters", {})}
    return found | {
        "rope_type": found.get("rope_type") or found.get("type") or "default",
        "rope_theta": found.get("rope_theta") or optional(config, "rope_theta"),
    }


def geometry(config: Config) -> Geometry:
    """Returns the sizes of a model's attention.

    Raises:
        ValueError: a size is missing.
        jax_mla.UnsupportedError: queries have no latent, or no geometry has these sizes.
    """
    if optional(config, "q_lora_rank") is None:
        raise UnsupportedError(
            "config must have q_lora_rank, got none. Models that project queries without a latent"
            " (DeepSeek-V2-Lite, Kimi-Linear) have no use for q_absorb."
        )
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
    sizes = tuple(required(config, name, "Pass the config of an MLA model.") for name in names)
    known = {(g.q_rank, g.kv_rank, g.nope, g.rope): g for g in GEOMETRIES}
    if sizes not in known:
        models = ", ".join(f"{found.name} {list(of)}" for of, found in known.items())
        raise UnsupportedError(
            f"config's {', '.join(names)} must be of one of {models}, got {list(sizes)}."
            " Only these sizes are supported."
        )
    return known[sizes]


def fp8_block(config: Config) -> tuple[int, int]:
    """Returns how many rows and columns of an FP8 weight share a scale."""
    quantization = optional(config, "quantization_config", {})
    rows, columns = optional(quantization, "weight_block_size", (128, 128))
    return rows, columns


def latent_factors(config: Config) -> tuple[float, float]:
    """Returns what the normalised query and KV latents are multiplied by.

    sqrt(hidden / rank) in LongCat's models (modeling_longcat_flash.py), whose config.json says so;
    `transformers` has it for all models of this type. 1 in others.
    """
    is_longcat = str(optional(config, "model_type", "")).startswith("longcat")

    def factor(latent: str) -> float:
        if not optional(config, f"mla_scale_{latent}", is_longcat):
            return 1.0
        hidden = required(config, "hidden_size", "The latents' scaling needs it.")
        rank = required(config, f"{latent}_rank", "The latents' scaling needs it.")
        return float((hidden / rank) ** 0.5)

    return factor("q_lora"), factor("kv_lora")
