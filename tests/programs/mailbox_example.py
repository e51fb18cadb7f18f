"""dcp_decode.py --mailbox in two processes with a CPU each, one of its parts wrong.

python mailbox_example.py PART
"""

import sys

import dcp_decode
import dcp_mailbox
import jax
import jax.numpy as jnp

from jax_mla import dcp

RIGHT_MERGE, RIGHT_REPORT = dcp.merge, dcp_decode.report


def rank_0_only(
    outs: jax.Array, lses: jax.Array, axis: str, *, base2: bool = False
) -> tuple[jax.Array, jax.Array]:
    own = lses + jnp.where(jax.lax.axis_index(axis) == 0, 0, -jnp.inf)
    return RIGHT_MERGE(outs, own, axis, base2=base2)


def wrong_in_process_1(
    actual: dcp_decode.Result, expected: dcp_decode.Result, interleave: int
) -> bool:
    return RIGHT_REPORT(actual, expected, interleave) and jax.process_index() == 0


# The two processes import this file too.
match sys.argv[1]:
    case "merge":
        dcp.merge = rank_0_only
    case "process 1":
        dcp_decode.report = wrong_in_process_1

if __name__ == "__main__":
    options = dcp_decode.parse(["--prefill", "20", "--steps", "2"])
    print(f"agrees: {dcp_mailbox.in_two_processes(options, dcp_decode.compare, 'cpu')}")
