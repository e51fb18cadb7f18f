"""What tests of q_absorb need: inputs, a float64 oracle, and distances between results."""

from jax_mla.testing.checkpoint import write_checkpoint
from jax_mla.testing.compare import (
    Bytes,
    bf16_steps,
    bytes_of,
    check_cache,
    check_q_latent,
    check_query,
    e4m3_steps,
)
from jax_mla.testing.inputs import make_inputs
from jax_mla.testing.oracle import Oracle, oracle
from jax_mla.testing.rounding import round_to_bf16, round_to_e4m3

__all__ = [
    "Bytes",
    "Oracle",
    "bf16_steps",
    "bytes_of",
    "check_cache",
    "check_q_latent",
    "check_query",
    "e4m3_steps",
    "make_inputs",
    "oracle",
    "round_to_bf16",
    "round_to_e4m3",
    "write_checkpoint",
]
