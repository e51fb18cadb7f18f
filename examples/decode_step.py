"""A decode loop on jax_mla.q_absorb, checked against un-absorbed attention in FP32.

One attention layer of Kimi-K3 (NoPE: the 64 "rope" columns are never rotated) decodes a few tokens
of a few sequences. Every step is one jitted function with a donated cache:

    hidden -> qkv -> q_absorb (queries in FP8, cache row in FP8) -> attention over the paged cache
           -> values un-absorbed

The same weights go through the textbook form: keys and values expanded for each head from latents
that are never quantised, all in FP32 with NumPy. The outputs may differ by what FP8 rounding
explains and no more; otherwise the exit status is 1.

    python examples/decode_step.py                  # small, runs on a CPU in seconds
    python examples/decode_step.py --heads 96       # the whole layer, on a GPU
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

import jax_mla

Array = npt.NDArray[np.float32]

HIDDEN, Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 7168, 1536, 512, 128, 64, 128
KV_END, ROW = Q_RANK + KV_RANK, KV_RANK + ROPE
EPS = 1e-5
SOFTMAX_SCALE = (NOPE + ROPE) ** -0.5

# A stored byte is e4m3(value / scale). Queries and latents here stay below 6, so 0.02 keeps them
# under e4m3's 448 and above its subnormals. Not a power of two: a forgotten scale then shows.
Q_SCALE, K_SCALE = 0.02, 0.02

# Rounding to e4m3 (three mantissa bits, nearest even) has an error of 2.4 % RMS: uniform within
# half a step, 2**-4 of the leading power of two, over the RMS of a mantissa in [1, 2). Queries and
# keys are rounded independently and scores are of order one, so weights carry sqrt(2) times that;
# the values that they weigh are rounded once more: sqrt(3) * 2.4 % = 4.1 % in all. One step of one
# head is a small sample of that and may show three times as much; all steps together may show half
# as much again.
E4M3_ERROR = 2.0**-4 / 3**0.5 / (7 / 3) ** 0.5
EXPECTED_ERROR = 3**0.5 * E4M3_ERROR
STEP_BOUND, OVERALL_BOUND = 3 * EXPECTED_ERROR, 1.5 * EXPECTED_ERROR


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """Weights of one layer, named and laid out as in a checkpoint; all bf16."""

    qkv_a_proj: jax.Array  # [2112, 7168]
    q_a_layernorm: jax.Array  # [1536]
    kv_a_layernorm: jax.Array  # [512]
    q_b_proj: jax.Array  # [H * 192, 1536]
    w_uk: jax.Array  # [H, 128, 512], the key rows of kv_b_proj
    w_uv: jax.Array  # [H, 128, 512], the value rows of kv_b_proj


jax.tree_util.register_dataclass(Layer)


def random_layer(heads: int, rng: np.random.Generator) -> Layer:
    """A layer whose projections keep unit variance."""

    def projection(rows: int, columns: int) -> jax.Array:
        values = rng.standard_normal((rows, columns), np.float32)
        return jnp.asarray(values * columns**-0.5, jnp.bfloat16)

    def norm(columns: int) -> jax.Array:
        return jnp.asarray(1 + 0.1 * rng.standard_normal(columns, np.float32), jnp.bfloat16)

    # Split once, when the checkpoint is loaded: a slice inside the step would be a copy a step.
    kv_b_proj = projection(heads * (NOPE + VALUE), KV_RANK).reshape(heads, NOPE + VALUE, KV_RANK)
    return Layer(
        qkv_a_proj=projection(KV_END + ROPE, HIDDEN),
        q_a_layernorm=norm(Q_RANK),
        kv_a_layernorm=norm(KV_RANK),
        q_b_proj=projection(heads * (NOPE + ROPE), Q_RANK),
        w_uk=kv_b_proj[:, :NOPE],
        w_uv=kv_b_proj[:, NOPE:],
    )


def decode_step(
    layer: Layer,
    hidden: jax.Array,
    cache: jax.Array,
    page_table: jax.Array,
    position: jax.Array,
    implementation: str,
) -> tuple[jax.Array, jax.Array]:
    """Attention output of one token a sequence, and the cache with that token in it.

    Args:
        layer: the weights.
        hidden: [B, 7168] bf16, after the layer's input norm.
        cache: [P, S, 576] e4m3, donated.
        page_table: [B, N] int32, the pages of each sequence in order.
        position: [] int32, the index of this token in its sequence.
        implementation: as in jax_mla.q_absorb.

    Returns:
        (output, cache): output is [B, H, 128] f32, before the output projection.
    """
    page_size = cache.shape[1]
    qkv = jnp.dot(hidden, layer.qkv_a_proj.T, preferred_element_type=jnp.float32)
    q, cache = jax_mla.q_absorb(
        qkv.astype(jnp.bfloat16),
        layer.q_a_layernorm,
        layer.kv_a_layernorm,
        layer.q_b_proj,
        layer.w_uk,
        cache,
        page_table[:, position // page_size] * page_size + position % page_size,
        q_scale=Q_SCALE,
        k_scale=K_SCALE,
        eps=EPS,
        implementation=implementation,
    )
    latents = attend(q, cache, page_table, position)
    return jnp.einsum("bhl,hvl->bhv", latents, layer.w_uv.astype(jnp.float32)), cache


def attend(q: jax.Array, cache: jax.Array, page_table: jax.Array, position: jax.Array) -> jax.Array:
    """[B, H, 512] f32: absorbed attention. A cache row is the key and the value of every head."""
    batch, page_count = page_table.shape
    length = page_count * cache.shape[1]
    keys = cache[page_table].reshape(batch, length, ROW).astype(jnp.float32) * K_SCALE
    scores = jnp.einsum("bhd,btd->bht", q.astype(jnp.float32) * Q_SCALE, keys) * SOFTMAX_SCALE
    # A page holds whatever its last owner left: rows past the position are masked everywhere.
    written = jnp.arange(length) <= position
    weights = jax.nn.softmax(jnp.where(written, scores, -jnp.inf))
    values = jnp.where(written[:, None], keys[..., :KV_RANK], 0)
    return jnp.einsum("bht,btl->bhl", weights, values)


class UnabsorbedAttention:
    """The layer in its textbook form: FP32, NumPy, a cache of latents that are never rounded."""

    def __init__(self, layer: Layer) -> None:
        self._layer = {
            field.name: np.asarray(getattr(layer, field.name), np.float32)
            for field in dataclasses.fields(layer)
        }
        self._latents: list[Array] = []
        self._k_pe: list[Array] = []

    def step(self, hidden: Array) -> Array:
        """[B, H, 128]: the attention output of the next token, hidden [B, 7168]."""
        layer = self._layer
        qkv = hidden @ layer["qkv_a_proj"].T
        q = _rms_norm(qkv[:, :Q_RANK], layer["q_a_layernorm"]) @ layer["q_b_proj"].T
        q = q.reshape(len(q), -1, NOPE + ROPE)
        self._latents.append(_rms_norm(qkv[:, Q_RANK:KV_END], layer["kv_a_layernorm"]))
        self._k_pe.append(qkv[:, KV_END:])
        latents = np.stack(self._latents, axis=1)[:, None]  # [B, 1, T, 512]
        keys = latents @ layer["w_uk"].swapaxes(1, 2)  # [B, H, T, 128]
        values = latents @ layer["w_uv"].swapaxes(1, 2)
        scores = (keys @ q[..., :NOPE, None])[..., 0]  # [B, H, T]
        scores += q[..., NOPE:] @ np.stack(self._k_pe, axis=2)
        weights = _softmax(scores * SOFTMAX_SCALE)
        return np.asarray((weights[:, :, None] @ values)[:, :, 0], np.float32)


def _rms_norm(x: Array, weight: Array) -> Array:
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    return np.asarray(x / np.sqrt(mean_square + EPS) * weight, np.float32)


def _softmax(scores: Array) -> Array:
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=-1, keepdims=True), np.float32)


def relative_error(actual: Array, expected: Array) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What a decode loop produced, a row a step."""

    outputs: Array  # [steps, B, H, 128], from decode_step
    expected: Array  # the same, from UnabsorbedAttention
    times_us: list[float]
    program: str  # text of the compiled step


def decode(options: argparse.Namespace) -> Run:
    """Decodes random hidden states on random weights and prints a line a step."""
    rng = np.random.default_rng(options.seed)
    layer = random_layer(options.heads, rng)
    unabsorbed = UnabsorbedAttention(layer)
    hidden = rng.standard_normal((options.steps, options.batch, HIDDEN), np.float32)
    rows = jnp.asarray(hidden, jnp.bfloat16)
    pages_each = -(-options.steps // options.page_size)
    page_count = options.batch * pages_each
    page_order = rng.permutation(page_count).reshape(options.batch, pages_each)
    page_table = jnp.asarray(page_order, jnp.int32)
    # NaN, so that a row that is read before it is written shows.
    cache = jnp.full((page_count, options.page_size, ROW), jnp.nan, jnp.float8_e4m3fn)

    jitted = jax.jit(decode_step, static_argnames="implementation", donate_argnames="cache")
    first = layer, rows[0], cache, page_table, jnp.int32(0)
    step = jitted.lower(*first, implementation=options.implementation).compile()
    outputs, expected, times_us = [], [], []
    for index in range(options.steps):
        row, position = rows[index], jnp.int32(index)
        start = time.perf_counter()
        output, cache = jax.block_until_ready(step(layer, row, cache, page_table, position))
        times_us.append((time.perf_counter() - start) * 1e6)
        outputs.append(np.asarray(output))
        expected.append(unabsorbed.step(np.asarray(row, np.float32)))
        error = relative_error(outputs[-1], expected[-1])
        print(f"step {index:3}: error {error:6.2%}, {times_us[-1]:8.0f} us")
    return Run(
        outputs=np.stack(outputs),
        expected=np.stack(expected),
        times_us=times_us,
        program=step.as_text() or "",
    )


def report(run: Run) -> bool:
    """Prints a summary; whether the errors are within the bounds."""
    # The compiled program is the witness of what ran: the kernel is a custom call in it.
    uses_kernel = 'custom_call_target="jax_mla_q_absorb"' in run.program
    ran = "the CUDA kernel" if uses_kernel else "the jax.numpy reference"
    worst = max(relative_error(*pair) for pair in zip(run.outputs, run.expected, strict=True))
    overall = relative_error(run.outputs, run.expected)
    print(f"implementation: {ran} on {jax.devices()[0].device_kind}")
    print(f"time a step: {statistics.median(run.times_us):.0f} us (median, host clock)")
    print(f"largest error of a step: {worst:.2%} of the FP32 output, {STEP_BOUND:.2%} allowed")
    print(f"error of all steps: {overall:.2%} of the FP32 output, {OVERALL_BOUND:.2%} allowed")
    # A NaN anywhere makes `overall` NaN, which is not within a bound.
    return overall <= OVERALL_BOUND and worst <= STEP_BOUND


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Decode with jax_mla.q_absorb and check it.")
    parser.add_argument(
        "--heads", type=positive, default=6, help="heads on this GPU (Kimi-K3 has 96)"
    )
    parser.add_argument("--batch", type=positive, default=4, help="sequences")
    parser.add_argument("--steps", type=positive, default=24, help="tokens to decode")
    parser.add_argument("--page-size", type=positive, default=16, help="cache rows a page")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--implementation", choices=("auto", "cuda", "reference"), default="auto")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 when the errors are within the bounds, else 1."""
    within_bounds = report(decode(parse(arguments)))
    print("ok" if within_bounds else "FAILED: the error is more than FP8 rounding explains")
    return 0 if within_bounds else 1


if __name__ == "__main__":
    sys.exit(main())
