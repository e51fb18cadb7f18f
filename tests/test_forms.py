"""Rotated queries, other dtypes and cache rows, the query latent, and other models' sizes."""

import logging
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import (
    AXES,
    BATCH,
    SCALES,
    assert_same,
    cpu_mesh,
    exact_inputs,
    mesh_slots,
    place,
)

import jax_mla
from jax_mla import MeshAxes, reference, testing, variants
from jax_mla.formats import CACHE_FORMATS, STYLES, CacheFormat
from jax_mla.geometry import GEOMETRIES, Geometry
from jax_mla.testing import bytes_of, make_inputs

BF16, E4M3 = jnp.bfloat16, jnp.float8_e4m3fn
by_name = pytest.mark.parametrize("cache", CACHE_FORMATS, ids=lambda stored: stored.name)


def absorb(inputs: dict[str, Any], **options: Any) -> Any:
    return jax_mla.q_absorb(**inputs, **options)


def check(inputs: dict[str, Any], q_dtype: Any = None, **scales: Any) -> None:
    expected = testing.oracle(inputs, q_dtype=q_dtype, **scales)
    q, cache, q_latent = absorb(inputs, q_dtype=q_dtype, return_q_norm=True, **scales)
    testing.check_query(q, expected)
    testing.check_cache(cache, expected)
    testing.check_q_latent(q_latent, expected)


@by_name
@pytest.mark.parametrize("style", [None, *STYLES])
def test_every_form_agrees_with_float64(style: str | None, cache: CacheFormat) -> None:
    for q_dtype in cache.q_dtypes:
        inputs = make_inputs(19, 3, rope=style, cache=cache.name, seed=len(q_dtype))
        check(inputs, q_dtype)


@by_name
@pytest.mark.parametrize("model", GEOMETRIES, ids=lambda geometry: geometry.name)
def test_every_model_agrees_with_float64(model: Geometry, cache: CacheFormat) -> None:
    inputs = make_inputs(9, 2, rope="interleaved", cache=cache.name, model=model.name, page_size=7)
    check(inputs)
    scales = {"q_scale": 0.02, "k_scale": 0.3}
    check(make_inputs(5, 2, rope="half", model=model.name, columns=4000), **scales)


def test_geometries_are_told_apart_by_the_weights() -> None:
    assert len({(size.q_rank, size.kv_rank, size.nope) for size in GEOMETRIES}) == len(GEOMETRIES)


def test_positions_outside_of_the_table_count_as_its_ends() -> None:
    inputs = make_inputs(4, 2, rope="half")
    rope = inputs["rope"]
    last = rope.cos_sin.shape[0] - 1
    beyond = rope.at(jnp.array([-(2**31), -1, last + 1, 2**31 - 1], jnp.int32))
    ends = rope.at(jnp.array([0, 0, last, last], jnp.int32))
    assert_same(absorb(inputs | {"rope": beyond}), absorb(inputs | {"rope": ends}))


def test_a_rotation_by_nothing_changes_nothing() -> None:
    inputs = make_inputs(4, 2, rope="half")
    still = jnp.concatenate([jnp.ones((1, 32)), jnp.zeros((1, 32))], axis=1)
    for style in STYLES:
        rope = jax_mla.Rope(still, inputs["rope"].positions, style)
        assert_same(absorb(inputs | {"rope": rope}), absorb(inputs | {"rope": None}))


def test_styles_differ_by_a_permutation_of_columns() -> None:
    inputs = make_inputs(6, 1, rope="interleaved")
    order = np.arange(64).reshape(32, 2).T.ravel()  # the columns 2i, then the columns 2i + 1
    head, key = np.r_[:128, 128 + order], np.r_[:2048, 2048 + order]
    row = np.r_[:512, 512 + order]
    permuted = inputs | {
        "w_qb": inputs["w_qb"][head],
        "qkv": inputs["qkv"][:, key],
        "cache": inputs["cache"][:, :, row],
        "rope": replace(inputs["rope"], style="half"),
    }
    q, cache = absorb(inputs)
    assert_same(absorb(permuted), (q[:, :, row], cache[:, :, row]))


def test_scores_depend_on_the_distance_of_positions_only() -> None:
    x = reference._round_to_bf16(jax.random.normal(jax.random.key(0), (2, 64)))
    for style in STYLES:
        rope = jax_mla.Rope.default(max_positions=400, style=style)

        def score(query: int, key: int, rope: jax_mla.Rope = rope) -> float:
            turned = reference.rotate(x, rope.cos_sin[jnp.array([query, key])], rope.style)
            return float(turned[0] @ turned[1])

        assert abs(score(317, 300) - score(17, 0)) < 0.1 < abs(score(317, 300) - score(317, 301))


@pytest.mark.parametrize(
    ("largest", "scale"),
    [
        (0.0, 2.0**-13),
        (448 * 2.0**-13, 2.0**-13),
        (450 * 2.0**-13, 2.0**-12),
        (448.0, 1.0),
        (450.0, 2.0),  # the next BF16 value
        (3.0e38, 2.0**120),
        (float("nan"), 2.0**-13),
        (float("inf"), 2.0**-13),
    ],
)
def test_scales_of_tiles_are_the_smallest_powers_of_two_that_fit(
    largest: float, scale: float
) -> None:
    tiles = jnp.zeros((1, 4, 128), jnp.float32).at[0, 2, 77].set(-largest)
    assert reference.tile_scales(tiles).tolist() == [[2.0**-13, 2.0**-13, scale, 2.0**-13]]


def test_bytes_of_a_row_of_fp8_ds_mla() -> None:
    """A latent of RMS 1 in one column: 512**0.5 in a tile of scale 1/16, other tiles empty."""
    inputs = make_inputs(1, 1, cache="fp8_ds_mla") | {"slots": jnp.array([0], jnp.int32)}
    qkv = jnp.zeros((1, 2112), BF16).at[0, 1536 + 130].set(-3).at[0, 2048:].set(0.3)
    given = {"qkv": qkv, "kv_norm": jnp.ones(512, BF16)}
    row = bytes_of(absorb(inputs | given, eps=0.0)[1])[0, 0]
    latent = np.zeros(512, np.float32)
    latent[130] = -np.float32(22.625) * 16  # BF16 of 512**0.5, in units of the scale
    np.testing.assert_array_equal(row[:512], bytes_of(latent.astype(E4M3)))
    assert row[512:528].view(np.float32).tolist() == [2.0**-13, 2.0**-4, 2.0**-13, 2.0**-13]
    assert set(row[528:].view(np.uint16)) == {0x3E9A}


@by_name
def test_a_nan_row_changes_no_other_row(cache: CacheFormat) -> None:
    inputs = make_inputs(5, 2, rope="half", cache=cache.name)
    q, stored, latent = absorb(inputs, return_q_norm=True)
    bad = inputs | {"qkv": inputs["qkv"].at[2].set(jnp.nan)}
    got_q, got, got_latent = absorb(bad, return_q_norm=True)
    others = np.arange(5) != 2
    assert_same((got_q[others], got_latent[others]), (q[others], latent[others]))
    assert np.isnan(np.asarray(got_latent[2], np.float32)).all()
    rows = np.delete(np.arange(got.shape[0] * got.shape[1]), inputs["slots"][2])
    assert_same(*([x.reshape(-1, x.shape[2])[rows]] for x in (got, stored)))


@by_name
def test_jit_scan_vmap_and_no_tokens(cache: CacheFormat) -> None:
    inputs = make_inputs(6, 2, rope="interleaved", cache=cache.name)
    rope = inputs["rope"]
    expected = absorb(inputs, return_q_norm=True)
    assert_same(jax.jit(lambda given: absorb(given, return_q_norm=True))(inputs), expected)

    def step(cache: jax.Array, xs: Any) -> tuple[jax.Array, Any]:
        token = {"qkv": xs[0], "slots": xs[1], "rope": rope.at(xs[2])}
        q, cache, latent = absorb(inputs | token | {"cache": cache}, return_q_norm=True)
        return cache, (q, latent)

    lanes = [
        x.reshape(3, 2, *x.shape[1:]) for x in (inputs["qkv"], inputs["slots"], rope.positions)
    ]
    last, stacked = jax.jit(lambda xs: jax.lax.scan(step, inputs["cache"], xs))(lanes)
    mapped = jax.vmap(lambda xs: step(inputs["cache"], xs), in_axes=0, out_axes=(None, 0))(lanes)
    for got_cache, got in ((last, stacked), mapped):
        q, latent = (x.reshape(6, *x.shape[2:]) for x in got)
        assert_same((q, got_cache, latent), expected)

    none = {"qkv": inputs["qkv"][:0], "slots": inputs["slots"][:0]}
    none_rope = {"rope": rope.at(rope.positions[:0])}
    q, stored, latent = absorb(inputs | none | none_rope, return_q_norm=True)
    assert (q.shape, q.dtype, latent.shape) == ((0, 2, 576), expected[0].dtype, (0, 1536))
    np.testing.assert_array_equal(bytes_of(stored), bytes_of(inputs["cache"]))


def test_vmap_wants_each_lane_to_have_positions() -> None:
    inputs = make_inputs(6, 2, rope="interleaved")
    lanes = {name: inputs[name].reshape(3, 2, *inputs[name].shape[1:]) for name in ("qkv", "slots")}
    rope = inputs["rope"].at(inputs["rope"].positions[:2])
    with pytest.raises(NotImplementedError, match=r"positions, qkv, slots mapped .*got qkv, slots"):
        jax.vmap(lambda lane: absorb(inputs | lane | {"rope": rope}))(lanes)


def quarter_turns(style: str) -> jax_mla.Rope:
    """A table of exact rotations, by 0, 90, 180 or 270 degrees."""
    turns = np.random.default_rng(7).integers(0, 4, (50, 32))
    cos, sin = np.array([1, 0, -1, 0])[turns], np.array([0, 1, 0, -1])[turns]
    table = np.concatenate([cos, sin], axis=1, dtype=np.float32)
    return jax_mla.Rope(table, np.arange(BATCH, dtype=np.int32), style)


@pytest.mark.parametrize("style", STYLES)
def test_a_mesh_gives_the_bytes_of_one_device(style: str) -> None:
    mesh, rope = cpu_mesh(), quarter_turns(style)
    one = exact_inputs() | {"slots": mesh_slots(1, 1)[0], "rope": rope}
    expected = absorb(one, return_q_norm=True, **SCALES)
    assert (bytes_of(expected[0]) != bytes_of(absorb(one | {"rope": None}, **SCALES)[0])).any()

    # Every rank stores into its own pages: compare the rows that are stored.
    inputs = exact_inputs() | {"slots": mesh_slots(2, 2)}
    placed = place(inputs, AXES, mesh)
    at = AXES.shardings(mesh)
    placed["rope"] = jax_mla.Rope(
        jax.device_put(rope.cos_sin, at.cos_sin),
        jax.device_put(rope.positions, at.positions),
        style,
    )
    with jax.set_mesh(mesh):
        step = jax.jit(lambda given: absorb(given, axes=AXES, return_q_norm=True, **SCALES))
        q, cache, latent = step(placed)
    assert_same((q, latent), (expected[0], expected[2]))
    assert latent.sharding.is_equivalent_to(at.q_latent, 2)
    blocks = bytes_of(cache).reshape(2, 2, -1, 576)  # batch shard, rank, row
    reference_rows = bytes_of(expected[1]).reshape(-1, 576)
    for rank, slots in enumerate(inputs["slots"]):
        for token in np.flatnonzero((slots >= 0) & (one["slots"] >= 0)):
            row = blocks[token // (BATCH // 2), rank, slots[token]]
            np.testing.assert_array_equal(row, reference_rows[one["slots"][token]])


@by_name
def test_gathered_queries_keep_their_dtype_and_latents_their_type(cache: CacheFormat) -> None:
    mesh = cpu_mesh()
    inputs = make_inputs(4, 8, rope="half", cache=cache.name, pages=8, page_size=4)
    slots = np.full((2, 4), -1, np.int32)
    expected = absorb(inputs | {"slots": slots[0]}, return_q_norm=True)
    axes = MeshAxes(heads="tp", dcp="dcp", mesh=mesh)
    results = jax.jit(lambda given: absorb(given, axes=axes, return_q_norm=True))(
        inputs | {"slots": slots}
    )
    assert [x.dtype for x in results] == [x.dtype for x in expected]
    testing.check_query(results[0], testing.oracle(inputs))
    assert_same(results[1:], expected[1:])
    specs = MeshAxes(batch="dp", heads="tp").specs(mesh)
    assert (specs.cos_sin, specs.positions, specs.q_latent) == (P(), P("dp"), P("dp"))


WRONG = [
    ({"cos_sin": np.zeros((0, 64), np.float32)}, ("rope.cos_sin", "[1, 64]", "[0, 64]", "yarn")),
    ({"cos_sin": np.zeros((9, 32), np.float32)}, ("rope.cos_sin", "[9, 64]", "[9, 32]", "yarn")),
    ({"cos_sin": np.zeros(64, np.float32)}, ("rope.cos_sin", "[M, 64]", "[64]", "yarn")),
    ({"cos_sin": np.zeros((9, 64), BF16)}, ("rope.cos_sin", "float32", "bfloat16", "astype")),
    ({"cos_sin": None}, ("rope.cos_sin", "float32", "NoneType", "yarn")),
    ({"positions": None}, ("rope.positions", "int32", "NoneType", "rope.at")),
    ({"positions": np.zeros(5, np.int32)}, ("rope.positions", "[4]", "[5]", "rope.at")),
    ({"positions": np.zeros(4, np.uint32)}, ("rope.positions", "int32", "uint32", "astype")),
]


@pytest.mark.parametrize(("changes", "words"), WRONG)
def test_a_wrong_rope_is_refused_while_tracing(
    changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    inputs = make_inputs(4, 1, rope="half")
    inputs["rope"] = replace(inputs["rope"], **changes)
    with pytest.raises((TypeError, ValueError)) as caught:
        jax.eval_shape(absorb, inputs)
    message = str(caught.value)
    assert message.startswith(f"{words[0]} must "), message
    assert all(word in message for word in words), message


def test_a_rope_is_a_rope_of_a_known_style() -> None:
    inputs = make_inputs(4, 1, rope="half")
    with pytest.raises(TypeError, match=r"rope must be a jax_mla\.Rope, got tuple\..*Rope\.yarn"):
        absorb(inputs | {"rope": (inputs["rope"].cos_sin, inputs["rope"].positions)})
    with pytest.raises(ValueError, match="style must be one of interleaved, half, got 'neox'"):
        replace(inputs["rope"], style="neox")


@pytest.mark.parametrize(
    ("cache", "options", "message"),
    [
        ("bf16", {"q_dtype": E4M3}, "q_dtype must be bfloat16 with bf16 cache rows, got float8_e4"),
        ("fp8_ds_mla", {"q_dtype": E4M3}, "q_dtype must be bfloat16 with fp8_ds_mla cache rows"),
        ("e4m3", {"q_dtype": "float16"}, "q_dtype must be float8_e4m3fn or bfloat16 with e4m3"),
        (
            "bf16",
            {"q_scale": 0.5},
            "q_scale must be the Python number 1 with .* got 0.5",
        ),
        ("e4m3", {"q_dtype": BF16, "q_scale": 2}, "q_scale must be the Python number 1 with bf"),
        ("bf16", {"k_scale": 0.5}, "k_scale must be the Python number 1 with bf16 cache rows"),
        (
            "fp8_ds_mla",
            {"k_scale": jnp.float32(1)},
            "k_scale must be .* got ArrayImpl",
        ),
    ],
)
def test_mixtures_without_a_meaning_are_refused(
    cache: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        absorb(make_inputs(2, 1, cache=cache), **options)


def test_a_dtype_is_a_dtype() -> None:
    with pytest.raises(TypeError, match=r"q_dtype must be a dtype, got 'fp8'\. Pass jnp\.bf"):
        absorb(make_inputs(2, 1), q_dtype="fp8")


@pytest.mark.parametrize("shape", [(8, 656), (2, 4, 1, 656), (2, 4, 640)])
def test_a_uint8_cache_of_another_shape_is_told_the_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"cache must be \[P, S, 656\].*jnp\.uint8"):
        absorb(make_inputs(2, 1) | {"cache": jnp.zeros(shape, jnp.uint8)})


def test_options_of_another_type_are_refused() -> None:
    inputs = make_inputs(2, 1)
    with pytest.raises(
        TypeError, match=r"return_q_norm must be True or False, got .*Tracer.*stati"
    ):
        jax.jit(lambda flag: absorb(inputs, return_q_norm=flag))(True)
    with pytest.raises(TypeError, match=r"axes must be jax_mla\.MeshAxes, got str\. Name"):
        absorb(inputs, axes="data")
    with pytest.raises(TypeError, match=r"device must be a jax\.Device, got str\. Pass one"):
        jax_mla.supported("gpu")


@by_name
def test_a_program_with_a_rope_among_its_arguments_is_saved(cache: CacheFormat) -> None:
    inputs = make_inputs(3, 2, rope="half", cache=cache.name)
    step = jax.jit(lambda given: absorb(given, return_q_norm=True))
    checks = jax_mla.export_checks()
    exported = jax.export.export(step, platforms=("cpu",), disabled_checks=checks)(inputs)
    again = jax.export.deserialize(exported.serialize())
    assert_same(again.call(inputs), step(inputs))


@pytest.mark.parametrize("q_dtype", ["float8_e4m3fn", "bfloat16"])
def test_the_check_finds_a_rotation_of_what_was_not_rounded(q_dtype: str) -> None:
    inputs = make_inputs(32, 2, rope="half")
    expected, rope = testing.oracle(inputs, q_dtype=q_dtype), inputs["rope"]
    exact = expected.q_latent @ np.asarray(inputs["w_qb"]).astype(np.float64).T
    q_pe = exact.reshape(32, 2, 192)[:, :, 128:].astype(np.float32)
    angles = rope.cos_sin[jnp.clip(rope.positions, 0, rope.cos_sin.shape[0] - 1)]
    turned = np.asarray(reference.rotate(jnp.asarray(q_pe), angles[:, None], rope.style))
    wrong = expected.query.copy()
    wrong[..., 512:] = turned.astype(wrong.dtype)
    with pytest.raises(AssertionError, match="rope columns"):
        testing.check_query(wrong, expected)


def spoiled(array: Any, place: Any, by: int) -> Any:
    """A copy with the bits of one value moved."""
    changed = np.array(array)
    bits = changed.view({1: np.uint8, 2: np.uint16}[changed.dtype.itemsize])
    bits[place] = bits[place].astype(np.int32) + by
    return changed


def test_the_checks_fail_on_what_they_forbid_of_bf16_values() -> None:
    inputs = make_inputs(4, 2, rope="half", cache="bf16")
    expected = testing.oracle(inputs)
    latent = expected.q_latent.astype(BF16)
    largest = np.unravel_index(np.abs(expected.values).argmax(), expected.values.shape)
    row = tuple(np.argwhere(expected.written)[0])
    other = tuple(np.argwhere(~expected.written)[0])
    testing.check_query(spoiled(expected.query, largest, 1), expected)
    testing.check_q_latent(spoiled(latent, (0, 0), 1), expected)
    testing.check_cache(spoiled(expected.cache, (*row, 3), 1), expected)
    zeros = np.where(np.arange(576) % 8, expected.query.astype(np.float32), 0).astype(BF16)
    for check_, wrong in (
        (testing.check_query, spoiled(expected.query, largest, 3)),
        (testing.check_query, zeros),
        (testing.check_q_latent, spoiled(latent, (0, 0), 2)),
        (testing.check_q_latent, spoiled(latent, np.s_[0, :20], 1)),
        (testing.check_cache, spoiled(expected.cache, (*row, 3), 2)),
        (testing.check_cache, spoiled(expected.cache, (*other, 3), 1)),
        (testing.check_cache, spoiled(expected.cache, (*row, np.s_[:50]), 1)),
    ):
        with pytest.raises(AssertionError, match="differ"):
            check_(wrong, expected)


def test_the_check_fails_on_what_it_forbids_of_fp8_ds_mla_rows() -> None:
    expected = testing.oracle(make_inputs(4, 1, cache="fp8_ds_mla"))
    row = tuple(np.argwhere(expected.written)[0])
    latent = int(np.argmax(expected.cache[row][:512] & 0x7F))
    for column, by in ((latent, -2), (514, 1), (515, 1), (600, 4), (655, 1)):
        with pytest.raises(AssertionError, match="differ"):
            testing.check_cache(spoiled(expected.cache, (*row, column), by), expected)


def test_sizes_of_no_known_model_are_compared_with_the_nearest() -> None:
    glm = make_inputs(2, 1, model="GLM-5")
    for name, wrong, message in (
        ("q_norm", glm["q_norm"][:1536], r"q_norm must be \[2048\], got \[1536\]"),
        ("w_qb", glm["w_qb"][:, :1000], r"w_qb must be \[H \* 256, 2048\] .* got \[256, 1000\]"),
        ("w_uk", glm["w_uk"][:, :100], r"w_uk must be \[H, 192, 512\] .* got \[1, 100, 512\]"),
    ):
        with pytest.raises(ValueError, match=message):
            absorb(glm | {name: wrong})


def lowered(inputs: dict[str, Any], **options: Any) -> str:
    step = jax.jit(lambda given: absorb(given, **options))
    return str(step.trace(inputs).lower(lowering_platforms=("cuda",)).as_text())


@by_name
@pytest.mark.parametrize("style", [None, *STYLES])
def test_the_call_of_a_kernel_has_what_the_form_needs(
    style: str | None, cache: CacheFormat
) -> None:
    inputs = make_inputs(3, 2, rope=style, cache=cache.name, pages=4, page_size=5)
    for q_dtype, form in zip(cache.q_dtypes, ("fp8", "bf16")[-len(cache.q_dtypes) :], strict=True):
        options = {"implementation": "cuda", "q_dtype": q_dtype, "return_q_norm": True}
        text = lowered(inputs, **options)
        [call] = [line for line in text.splitlines() if "@jax_mla_q_absorb" in line]
        assert f'kernel = "{variants.choose(3, 2).key}_{form}"' in call
        assert f"style = {(None, *STYLES).index(style)} : i32" in call
        types = {"float8_e4m3fn": "f8E4M3FN", "bfloat16": "bf16", "uint8": "ui8"}
        rope = ", tensor<96x64xf32>, tensor<3xi32>" if style else ""
        stored = f"tensor<4x5x{inputs['cache'].shape[2]}x{types[cache.dtype]}>"
        assert f"{stored}, tensor<3xi32>, tensor<f32>, tensor<f32>{rope})" in call
        assert call.endswith(
            f"-> (tensor<3x2x576x{types[q_dtype]}>, {stored}, tensor<3x1536xbf16>)"
        )
        assert "output_tuple_indices = [1]" in call


@pytest.mark.parametrize(
    ("options", "message", "has_kernel"),
    [
        ({"rope": "half"}, "no GPU has run them", True),
        ({"cache": "bf16"}, "no GPU has run them", True),
        ({"cache": "fp8_ds_mla"}, "no GPU has run them", True),
        ({"model": "GLM-5"}, "no kernel is shipped for the sizes of GLM-5, only for", False),
    ],
)
def test_auto_takes_the_reference_where_no_kernel_is_proven(
    options: dict[str, Any], message: str, has_kernel: bool, caplog: pytest.LogCaptureFixture
) -> None:
    inputs = make_inputs(2, 1, **options)
    with caplog.at_level(logging.WARNING, "jax_mla"):
        assert "custom_call" not in lowered(inputs)
    assert [message in record.getMessage() for record in caplog.records] == [True]
    assert "custom_call" not in lowered(inputs, implementation="reference")
    if has_kernel:
        assert "@jax_mla_q_absorb" in lowered(inputs, implementation="cuda")
        return
    with pytest.raises(jax_mla.UnsupportedError, match=message):
        lowered(inputs, implementation="cuda")


def test_supported_knows_formats_and_models() -> None:
    for options, message in (
        ({"cache": "fp4"}, "cache must be one of e4m3, bf16, fp8_ds_mla, got 'fp4'"),
        ({"model": "Llama"}, "model must be one of DeepSeek, GLM-5, .* got 'Llama'"),
        ({"cache": "bf16", "q_dtype": E4M3}, "q_dtype must be bfloat16 with bf16 cache rows"),
    ):
        with pytest.raises(ValueError, match=message):
            jax_mla.supported(jax.devices("cpu")[0], **options)
