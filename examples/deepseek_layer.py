"""From a DeepSeek-V3 checkpoint to checked decode steps: jax_mla.weights, Rope and q_absorb.

One attention layer is read from a checkpoint in Hugging Face's format and decodes a few sequences,
which join one step after another, so that their positions differ. Every step is one jitted function
with a donated cache:

    hidden -> qkv -> q_absorb (RoPE; queries in FP8, cache row in FP8) -> attention over the paged
           cache -> values un-absorbed -> o_proj

The checkpoint's tensors also go through the textbook form: keys and values expanded for each head,
rotated by complex numbers, latents never quantised, all in FP32 with NumPy. The outputs may differ
by what FP8 rounding explains and no more; otherwise the exit status is 1. Without a checkpoint a
small one is made up, in FP8 with a scale for each block of 128 x 128 as DeepSeek's are.

    pip install 'jax_mla[hf]'                                  # safetensors
    python examples/deepseek_layer.py                          # made up, runs on a CPU in seconds
    python examples/deepseek_layer.py --checkpoint DeepSeek-V3 --layer 3
    pip install 'jax_mla[transformers]'
    python examples/deepseek_layer.py --against-transformers   # their attention, too
"""

import argparse
import dataclasses
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

import jax_mla
from jax_mla import testing

Array = npt.NDArray[np.float32]
Config = Mapping[str, Any]

FAMILY = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2")
"""Values of `model_type` whose attention is the one here; V3.2 attends to 2048 tokens at least."""

BLOCK, ROW = 128, 576

# Rounding to e4m3 (three mantissa bits, nearest even) has an error of 2.4 % RMS: uniform within
# half a step, 2**-4 of the leading power of two, over the RMS of a mantissa in [1, 2).
E4M3_ERROR = 2.0**-4 / 3**0.5 / (7 / 3) ** 0.5

# Transformers and the textbook form both compute in FP32, in another order.
FP32_BOUND = 1e-4


def decode_step(
    layer: jax_mla.weights.Layer,
    rope: jax_mla.Rope,
    hidden: jax.Array,
    cache: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    scales: tuple[jax.Array, jax.Array],
    implementation: str,
) -> tuple[jax.Array, jax.Array]:
    """The layer's output for one token a sequence, and the cache with that token in it.

    Args:
        layer: the weights.
        rope: the table, without positions.
        hidden: [B, hidden] bf16, after the layer's input norm.
        cache: [P, S, 576] e4m3, donated.
        page_table: [B, N] int32, the pages of each sequence in order.
        positions: [B] int32, the index of each token in its sequence; -1 for padding, whose row is
            not written and whose output means nothing.
        scales: of queries and keys, [] f32 each.
        implementation: as in jax_mla.q_absorb.

    Returns:
        (output, cache): output is [B, hidden] f32.
    """
    batch, page_size = len(hidden), cache.shape[1]
    page = jnp.take_along_axis(page_table, positions[:, None] // page_size, axis=1)[:, 0]
    q_scale, k_scale = scales
    q, cache = jax_mla.q_absorb(
        qkv_of(layer, hidden),
        layer.q_norm,
        layer.kv_norm,
        layer.w_qb,
        layer.w_uk,
        cache,
        jnp.where(positions < 0, -1, page * page_size + positions % page_size),
        q_scale=q_scale,
        k_scale=k_scale,
        eps=layer.eps,
        rope=rope.at(positions),
        implementation=implementation,
    )
    queries = q.astype(jnp.float32) * (q_scale * layer.softmax_scale)
    keys = cache[page_table].reshape(batch, -1, q.shape[2]).astype(jnp.float32) * k_scale
    latents = attend(queries, keys, layer.w_uv.shape[2], positions)
    values = jnp.einsum("bhl,hvl->bhv", latents, layer.w_uv.astype(jnp.float32))
    assert layer.w_o is not None
    return values.reshape(batch, -1) @ layer.w_o.astype(jnp.float32).T, cache


def qkv_of(layer: jax_mla.weights.Layer, hidden: jax.Array) -> jax.Array:
    qkv = jnp.dot(hidden, layer.w_a.T, preferred_element_type=jnp.float32)
    return qkv.astype(jnp.bfloat16)


def attend(queries: jax.Array, keys: jax.Array, rank: int, positions: jax.Array) -> jax.Array:
    """[B, H, rank] f32: absorbed attention. A row is the key and the value of every head.

    Queries are [B, H, 576] f32 times the softmax scale, keys [B, T, 576] f32, positions [B] int32.
    """
    # A page holds whatever its last owner left: rows past the position are masked everywhere.
    written = jnp.arange(keys.shape[1]) <= positions[:, None]
    scores = jnp.einsum("bhd,btd->bht", queries, keys)
    weights = jax.nn.softmax(jnp.where(written[:, None], scores, -jnp.inf))
    values = jnp.where(written[..., None], keys[..., :rank], 0)
    return jnp.einsum("bht,btl->bhl", weights, values)


def calibrated(layer: jax_mla.weights.Layer, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scales of queries and keys, [] f32, with which those of these tokens [N, hidden] fit in."""
    q, rows = jax_mla.q_absorb(
        qkv_of(layer, hidden),
        layer.q_norm,
        layer.kv_norm,
        layer.w_qb,
        layer.w_uk,
        jnp.zeros((1, len(hidden), ROW), jnp.bfloat16),
        jnp.arange(len(hidden), dtype=jnp.int32),
        eps=layer.eps,
    )
    # Without rope: a pair may turn into sqrt(2) of its larger value.
    q_max, k_max = (jnp.abs(x).max().astype(jnp.float32) for x in (q, rows))
    return 1.5 * q_max / 448, 1.5 * k_max / 448


def plain(tensors: Mapping[str, npt.NDArray[Any]]) -> dict[str, Array]:
    """The checkpoint's weights in FP32, by the names they have there."""
    weights = {}
    for name, tensor in tensors.items():
        if name.endswith(".weight"):
            weights[name] = tensor.astype(np.float32)
            if f"{name}_scale_inv" in tensors:
                scales = tensors[f"{name}_scale_inv"].astype(np.float32)
                of_each = scales.repeat(BLOCK, axis=0).repeat(BLOCK, axis=1)
                weights[name] *= of_each[: tensor.shape[0], : tensor.shape[1]]
    return weights


def textbook(weights: Mapping[str, Array], config: Config, hidden: Array) -> tuple[Array, float]:
    """The layer in its textbook form, FP32, for whole sequences [B, T, hidden] from position 0 on.

    Returns:
        (output, spread): [B, T, hidden], and the RMS of the scores before the softmax.
    """
    batch, length = hidden.shape[:2]
    nope, turned, rank = (
        config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank")
    )
    eps = config["rms_norm_eps"]
    latent = rms_norm(hidden @ weights["q_a_proj.weight"].T, weights["q_a_layernorm.weight"], eps)
    q = (latent @ weights["q_b_proj.weight"].T).reshape(batch, length, -1, nope + turned)
    kv_a = hidden @ weights["kv_a_proj_with_mqa.weight"].T
    latents = rms_norm(kv_a[..., :rank], weights["kv_a_layernorm.weight"], eps)
    kv = latents @ weights["kv_b_proj.weight"].T
    kv = kv.reshape(batch, length, -1, nope + config["v_head_dim"])
    turns, scale = positional(config, length)
    scores = np.einsum("bihd,bjhd->bhij", q[..., :nope], kv[..., :nope])
    k_pe = rotated(kv_a[..., rank:], turns)
    scores += np.einsum("bihd,bjd->bhij", rotated(q[..., nope:], turns[:, None]), k_pe)
    scores *= scale * (nope + turned) ** -0.5
    past = np.tri(length, dtype=bool)
    out = np.einsum("bhij,bjhd->bihd", softmax(np.where(past, scores, -np.inf)), kv[..., nope:])
    output = out.reshape(batch, length, -1) @ weights["o_proj.weight"].T
    spread = float(np.sqrt(np.mean(np.square(scores), where=past)))
    return np.asarray(output, np.float32), spread


def positional(config: Config, length: int) -> tuple[npt.NDArray[np.complex64], float]:
    """Unit complex numbers [T, R / 2] by which pairs turn, and YaRN's share of the softmax scale.

    YaRN (arXiv 2309.00071) as in DeepSeek-V3's inference/model.py.
    """
    # One dictionary or two, by the age of the file.
    given = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    width, theta = config["qk_rope_head_dim"], given.get("rope_theta") or config["rope_theta"]
    pairs = np.arange(width // 2)
    frequencies, scale = theta ** (-2.0 * pairs / width), 1.0
    if factor := given.get("factor"):
        context = given["original_max_position_embeddings"]
        bounds = [
            width / 2 * math.log(context / (2 * math.pi * given[turns]), theta)
            for turns in ("beta_fast", "beta_slow")
        ]
        first, last = math.floor(bounds[0]), math.ceil(bounds[1])
        stretched = np.clip((pairs - first) / (last - first), 0, 1)
        frequencies = frequencies * (1 - stretched) + frequencies / factor * stretched
        scale = (0.1 * given["mscale_all_dim"] * math.log(factor) + 1) ** 2
    angles = np.arange(length)[:, None] * frequencies
    return np.exp(1j * angles).astype(np.complex64), scale


def rotated(x: Array, turns: npt.NDArray[np.complex64]) -> Array:
    """x with columns 2i and 2i + 1 turned as real and imaginary part of a number."""
    return np.asarray((np.ascontiguousarray(x).view(np.complex64) * turns).view(np.float32))


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    return np.asarray(x / np.sqrt(mean_square + eps) * weight, np.float32)


def softmax(scores: Array) -> Array:
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=-1, keepdims=True), np.float32)


def transformers_attention(weights: Mapping[str, Array], config: Config, hidden: Array) -> Array:
    """The same [B, T, hidden] from the DeepseekV3 attention of the package transformers, FP32."""
    import torch
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

    others = ("model_type", "quantization_config")
    fields = {name: value for name, value in config.items() if name not in others}
    their_config = DeepseekV3Config(**fields)
    their_config._attn_implementation = "eager"
    module = theirs.DeepseekV3Attention(their_config, layer_idx=0).eval()
    module.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    length = hidden.shape[1]
    tensor = torch.from_numpy(hidden)
    embedding = theirs.DeepseekV3RotaryEmbedding(their_config)
    future = torch.full((length, length), -math.inf).triu(1)[None, None]
    with torch.no_grad():
        turns = embedding(tensor, torch.arange(length)[None])
        output, _ = module(tensor, position_embeddings=turns, attention_mask=future)
    return np.asarray(output.numpy(), np.float32)


def relative_error(actual: Array, expected: Array) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What a decode loop produced."""

    outputs: Array  # [B, T, hidden], from decode_step
    expected: Array  # the same, from textbook
    spread: float  # RMS of the scores
    theirs: Array | None  # the same as expected, from transformers
    times_us: list[float]
    program: str  # text of the compiled step


def decode(options: argparse.Namespace, folder: Path) -> Run:
    """Decodes random hidden states on a checkpoint's layer and prints a line a step."""
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] not in FAMILY:
        sys.exit(f"model_type must be one of {', '.join(FAMILY)}, got {config['model_type']}.")
    tensors = jax_mla.weights.read_layer(folder, options.layer)
    layer = jax_mla.weights.from_hf(tensors, config)
    rope = jax_mla.Rope.from_hf(config, max_positions=options.steps)

    rng, batch, steps = np.random.default_rng(options.seed), options.batch, options.steps
    shape = (batch, steps, config["hidden_size"])
    tokens = jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)
    exact, weights = np.asarray(tokens, np.float32), plain(tensors)
    expected, spread = textbook(weights, config, exact)
    theirs = None
    if options.against_transformers:
        theirs = transformers_attention(weights, config, exact)

    pages_each = -(-steps // options.page_size)
    page_order = rng.permutation(batch * pages_each).reshape(batch, pages_each)
    page_table = jnp.asarray(page_order, jnp.int32)
    # NaN, so that a row that is read before it is written shows.
    shape = (batch * pages_each, options.page_size, ROW)
    cache = jnp.full(shape, jnp.nan, jnp.float8_e4m3fn)
    scales = calibrated(layer, tokens.reshape(batch * steps, -1)[:4096])

    jitted = jax.jit(decode_step, static_argnames="implementation", donate_argnames="cache")
    first = layer, rope, tokens[:, 0], cache, page_table, jnp.zeros(batch, jnp.int32), scales
    step = jitted.lower(*first, implementation=options.implementation).compile()
    outputs, times_us = np.zeros_like(expected), []
    for index in range(steps + batch - 1):
        position = index - np.arange(batch, dtype=np.int32)  # a sequence joins at each step
        [active] = np.nonzero((position >= 0) & (position < steps))
        at = active, position[active]
        row = tokens[np.arange(batch), position.clip(0, steps - 1)]
        positions = jnp.where(position < steps, position, -1)
        start = time.perf_counter()
        output, cache = step(layer, rope, row, cache, page_table, positions, scales)
        jax.block_until_ready((output, cache))
        times_us.append((time.perf_counter() - start) * 1e6)
        outputs[at] = np.asarray(output)[active]
        error = relative_error(outputs[at], expected[at])
        print(f"step {index:3}: {len(active)} tokens, error {error:6.2%}, {times_us[-1]:8.0f} us")
    return Run(
        outputs=outputs,
        expected=expected,
        spread=spread,
        theirs=theirs,
        times_us=times_us,
        program=step.as_text() or "",
    )


def report(run: Run) -> bool:
    """Prints a summary; whether the errors are within the bounds."""
    # Queries and keys are rounded independently, so a score of RMS `spread` is off by sqrt(2) *
    # spread times e4m3's error, and its weight by as much of itself; values are rounded once more.
    # One step of a few tokens is a small sample of that and may show three times as much; all
    # steps together may show half as much again.
    expected_error = E4M3_ERROR * (2 * run.spread**2 + 1) ** 0.5
    step_bound, overall_bound = 3 * expected_error, 1.5 * expected_error
    # The compiled program is the witness of what ran: the kernel is a custom call in it.
    uses_kernel = 'custom_call_target="jax_mla_q_absorb"' in run.program
    ran = "the CUDA kernel" if uses_kernel else "the jax.numpy reference"
    pairs = zip(run.outputs.swapaxes(0, 1), run.expected.swapaxes(0, 1), strict=True)
    worst = max(relative_error(*pair) for pair in pairs)
    overall = relative_error(run.outputs, run.expected)
    print(f"implementation: {ran} on {jax.devices()[0].device_kind}")
    print(f"time a step: {statistics.median(run.times_us):.0f} us (median, host clock)")
    print(f"RMS of the scores: {run.spread:.2f}")
    print(f"largest error at a position: {worst:.2%} of the FP32 output, {step_bound:.2%} allowed")
    print(f"error of all steps: {overall:.2%} of the FP32 output, {overall_bound:.2%} allowed")
    # A NaN anywhere makes `overall` NaN, which is not within a bound.
    within_bounds = overall <= overall_bound and worst <= step_bound
    if run.theirs is not None:
        between = relative_error(run.expected, run.theirs)
        print(f"FP32 output against transformers: {between:.1e}, {FP32_BOUND:.1e} allowed")
        print(f"error of all steps against theirs: {relative_error(run.outputs, run.theirs):.2%}")
        within_bounds = within_bounds and between <= FP32_BOUND
    return bool(within_bounds)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Decode on a checkpoint's layer and check it.")
    parser.add_argument("--checkpoint", type=Path, help="its folder; one is made up if left out")
    parser.add_argument("--layer", type=int, default=0, help="number of the layer")
    parser.add_argument("--heads", type=positive, default=4, help="of a made-up model")
    parser.add_argument("--batch", type=positive, default=4, help="sequences")
    parser.add_argument("--steps", type=positive, default=32, help="tokens of a sequence")
    parser.add_argument("--page-size", type=positive, default=16, help="cache rows a page")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--implementation", choices=("auto", "cuda", "reference"), default="auto")
    parser.add_argument(
        "--against-transformers",
        action="store_true",
        help="compare with the attention of the package transformers too",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 when the errors are within the bounds, else 1."""
    options = parse(arguments)
    if options.checkpoint:
        within_bounds = report(decode(options, options.checkpoint))
    else:
        with tempfile.TemporaryDirectory() as folder:
            testing.write_checkpoint(folder, heads=options.heads, seed=options.seed + 1)
            within_bounds = report(decode(options, Path(folder)))
    print("ok" if within_bounds else "FAILED: the error is more than FP8 rounding explains")
    return 0 if within_bounds else 1


if __name__ == "__main__":
    sys.exit(main())
