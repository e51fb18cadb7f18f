"""Runs an exported call and prints its bits: python exported_call.py BATCH HEADS FILE."""

import hashlib
import json
import pathlib
import sys

import jax

# Importing from jax_mla registers the kernel's target.
from jax_mla.testing import bytes_of, make_inputs

batch, heads = map(int, sys.argv[1:3])
inputs = make_inputs(batch, heads, pages=5, page_size=16)
exported = jax.export.deserialize(bytearray(pathlib.Path(sys.argv[3]).read_bytes()))
results = jax.jit(exported.call)(inputs)
stored = b"".join(bytes_of(result).tobytes() for result in results)
print(json.dumps({"digest": hashlib.sha256(stored).hexdigest()}))
