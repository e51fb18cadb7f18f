"""Prints the bits of a jitted call and how many programs the compilation cache served for it.

python cached_call.py BATCH HEADS, with JAX_COMPILATION_CACHE_DIR set.
"""

import hashlib
import json
import sys

import jax

import jax_mla
from jax_mla.testing import bytes_of, make_inputs

jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

batch, heads = map(int, sys.argv[1:])
inputs = make_inputs(batch, heads, pages=5, page_size=16)
events: list[str] = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
results = jax.jit(lambda **x: jax_mla.q_absorb(**x, implementation="cuda"))(**inputs)
stored = b"".join(bytes_of(result).tobytes() for result in results)
hits = events.count("/jax/compilation_cache/cache_hits")
print(json.dumps({"digest": hashlib.sha256(stored).hexdigest(), "hits": hits}))
