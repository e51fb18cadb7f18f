"""What a model's configuration (config.json of a Hugging Face checkpoint) says about attention."""

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any] | object
"""The parsed config.json, or an object with its fields as attributes."""

DEEPSEEK_YARN = ("yarn", "deepseek_yarn")
"""Names of the RoPE scaling that DeepSeek's models use."""


def text_part(config: Config) -> Config:
    """Returns the language model's fields of a configuration that nests them, else all of it."""
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
    found.setdefault("rope_type", found.get("type", "default"))
    found.setdefault("rope_theta", optional(config, "rope_theta"))
    return found
