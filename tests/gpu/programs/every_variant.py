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
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp8": {"rope": "half"},
    "bf16": {"rope": "interleaved", "cache": "fp8_ds_mla"},
}

count = 0
for batch in BATCHES:
    for form, options in FORMS.items():
        inputs = make_inputs(batch, 2, pages=3, page_size=5, **options)
        slots = np.asarray(inputs["slots"]).copy()
        slots[-1] = 14
        slots[: batch // 3] = -1
        for variant in variants.PLAIN_VARIANTS:
            with forced_variant(variant.key):
                call = jax.jit(
                    lambda arrays, latent=form != "plain": jax_mla.q_absorb(
                        **arrays, return_q_norm=latent, implementation="cuda"
                    )
                )
                jax.block_until_ready(call({**inputs, "slots": slots}))
            count += 1
print("calls", count)
