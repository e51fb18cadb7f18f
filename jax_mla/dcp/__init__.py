"""Decode-context parallelism: which rank stores which token, and merging attention over ranks."""

from jax_mla.dcp.merge import merge
from jax_mla.dcp.ownership import local_lengths, local_slots, owner

__all__ = ["local_lengths", "local_slots", "merge", "owner"]
