"""Calls every shipped kernel on small shapes, for compute-sanitizer; prints how many calls ran.

Inputs come from NumPy, so that the process launches next to nothing but the kernels. They are small
pages with the last row written, and a batch that leaves a tail in every tile.
"""

from typing import Any

import jax
import numpy as np
from forced import forced_variant  # benchmarks/ is on the path that the test sets

import jax_mla
from jax_mla import variants
from jax_mla.testing import make_inputs

BATCHES = (1, 11)
# Inputs, then options of the call; each form is there for each variant.
FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"rope": "half"}, {"return_q_norm": True}),
    ({"rope": "interleaved"}, {}),
    ({}, {"return_q_norm": True}),
    ({}, {"q_dtype": "bfloat16"}),
    ({"rope": "half", "cache": "bf16"}, {}),
    ({"rope": "interleaved", "cache": "fp8_ds_mla"}, {"return_q_norm": True}),
]

count = 0
for batch in BATCHES:
    for chosen, options in FORMS:
        inputs = make_inputs(batch, 2, pages=3, page_size=5, **chosen)
        slots = np.asarray(inputs["slots"]).copy()
        slots[-1] = 14
        slots[: batch // 3] = -1
        for variant in variants.PLAIN_VARIANTS:
            with forced_variant(variant.key):
                call = jax.jit(
                    lambda arrays, options=options: jax_mla.q_absorb(
                        **arrays, **options, implementation="cuda"
                    )
                )
                jax.block_until_ready(call({**inputs, "slots": slots}))
            count += 1
print("calls", count)
