"""Exports a call for CUDA where no GPU is seen: python export_call.py BATCH HEADS FILE."""

import json
import pathlib
import sys

import jax

import jax_mla
from jax_mla.testing import make_inputs

batch, heads = map(int, sys.argv[1:3])
inputs = make_inputs(batch, heads, pages=5, page_size=16)
exported = jax.export.export(
    jax.jit(lambda x: jax_mla.q_absorb(**x, implementation="cuda")),
    platforms=["cuda"],
    disabled_checks=jax_mla.export_checks(),
)(inputs)
pathlib.Path(sys.argv[3]).write_bytes(exported.serialize())
print(json.dumps({"devices": [device.platform for device in jax.devices()]}))
