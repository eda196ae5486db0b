"""The TPU kernels in Pallas' interpreter: right, free of races, and wrong when a line is missing."""

from __future__ import annotations

import functools
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

# Where the interpreter of jax 0.10 keeps what its race detector found; there is no public way to ask.
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax._src.pallas.mosaic.interpret import utils as interpreter_utils
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.paged_attention import AttentionCall, paged_attention, plan_attention
from kernels_pallas.paged_attention.tpu import append, attend, entry, fetch, items, kernel, rows
from kernels_pallas.paged_attention.tpu.block_sizes import Blocks
from scripts.kernels.named_calls import by_name
from tests.kernels.paged_attention.mutants import mutant
from tests.kernels.paged_attention.oracle import check_pages, expected_output, make_call, write

SMALL: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "table_width": 8}
ROWS = ("block_tables", "kv_lens", "cu_q_lens")
# Lengths around a page of 16 and a block of 2 pages, with an empty row between.
DECODE = [(1, n) for n in (1, 15, 16, 17, 0, 33, 64, 128, 100)]


def run(call, kernels=entry, execution: Literal["eager", "on_wait"] = "eager", tolerance=2e-5, trees=None, **options):
    """Runs a call in the interpreter and checks the result, the pages, and that there was no race."""
    scale = call.arguments["q"].shape[-1] ** -0.5
    interpret = pltpu.InterpretParams(detect_races=True, dma_execution_mode=execution)
    attend = functools.partial(by_name(kernels.paged_attention_tpu), scale=scale, interpret=interpret, **options)
    out, pages = jax.jit(attend)(**call.arguments)
    options = {name: options[name] for name in ("window", "softcap") if name in options}
    options |= {name: call.arguments[name] for name in ("sinks",) if name in call.arguments}
    expected = expected_output(call, scale, trees=trees, **options)
    is_real = ~np.isnan(expected)
    actual = np.asarray(out)[: call.num_tokens].astype(np.float32)
    np.testing.assert_allclose(actual[is_real], expected[is_real], rtol=tolerance, atol=tolerance)
    assert np.isfinite(out).all()
    check_pages(call, call.arguments["pages"], pages)
    assert interpreter.races is not None
    assert not interpreter.races.races_found


def decode(call, **options):
    run(call, q_len=1, blocks=Blocks(pages=2, buffers=4), **options)


def ragged(call, **options):
    run(call, blocks=Blocks(pages=2, buffers=3, queries=8), **options)


# Long rows and single tokens in any order, chunks that start and end inside tiles, an empty row.
RAGGED = [(7, 23), (1, 40), (5, 5), (1, 1), (33, 64), (0, 0)]


# Integers with a scale for each token and head. Heads of 16 share their lanes, keys left and values right.
BY_TOKEN: dict[str, Any] = {**SMALL, "page_dtype": "int8", "has_scales": True, "page_size": 32, "layout": "tpu"}


def narrow_pages(dtype) -> dict[str, Any]:
    """Arguments of `make_call` for bfloat16 queries over pages of `dtype`."""
    scales = None if dtype == "bfloat16" else tuple(np.array(x, np.float32) for x in ([0.02, 0.03], [0.03, 0.02]))
    return {"dtype": jnp.bfloat16, "page_dtype": dtype, "scales": scales, "page_size": 32}


@pytest.mark.parametrize("execution", ["eager", "on_wait"])
def test_decoding_rows_of_any_length_is_exact_and_free_of_races(execution):
    decode(make_call(DECODE, **SMALL, layout="tpu"), execution=execution)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    # A piece has 128 rows of queries at most.
    [(3, 3, 64), (8, 1, 80), (10, 10, 96), (18, 2, 128), (4, 4, 256), (4, 2, 512), (136, 1, 16)],
    ids=str,
)
def test_decoding_is_exact_for_any_heads(num_heads, num_kv_heads, head_dim):
    sizes: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}

    decode(make_call([(1, 1), (1, 50)], **{**SMALL, **sizes}, layout="tpu"))


@pytest.mark.parametrize("window", [1, 20])
def test_decoding_honours_window_soft_cap_and_sinks_together(window):
    call = make_call(DECODE[3:], **SMALL, layout="tpu").with_freed_pages(window)

    decode(call.with_options(sinks=np.array([-1, 0, 1, 2], np.float32)), window=window, softcap=0.5)


@pytest.mark.parametrize("page_dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_decoding_from_narrow_pages_is_exact_up_to_the_rounding_of_bfloat16(page_dtype):
    narrow = narrow_pages(page_dtype)

    decode(make_call([(1, 33), (1, 64), (1, 1), (1, 70)], **SMALL, **narrow, layout="tpu"), tolerance=0.03)


# One row ends in the middle of a page, one at its end, one after its first token.
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "page_size"),
    [(3, 3, 64, 16), (4, 1, 80, 64), (4, 2, 128, 128), (2, 2, 256, 32), (20, 10, 16, 32)],
    ids=str,
)
def test_decoding_from_integers_scaled_by_token_is_exact_for_any_heads_and_pages(
    num_heads, num_kv_heads, head_dim, page_size
):
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "page_size": page_size}
    lens = [(1, n) for n in (page_size + 5, 2 * page_size, 0, page_size + 1)]

    decode(make_call(lens, **{**BY_TOKEN, **sizes, "table_width": 3}))


@pytest.mark.parametrize("execution", ["eager", "on_wait"])
@pytest.mark.parametrize("attend", [decode, ragged], ids=["decode", "ragged"])
def test_attention_to_integers_scaled_by_token_is_exact_and_free_of_races(attend, execution):
    attend(make_call(DECODE if attend is decode else RAGGED, **BY_TOKEN), execution=execution)


@pytest.mark.parametrize("attend", [decode, ragged], ids=["decode", "ragged"])
def test_integers_scaled_by_token_go_with_window_soft_cap_and_sinks(attend):
    lens = DECODE[5:] if attend is decode else [(7, 23), (20, 90), (1, 30)]
    call = make_call(lens, **BY_TOKEN).with_freed_pages(20)

    attend(call.with_options(sinks=np.array([-1, 0, 1, 2], np.float32)), window=20, softcap=0.5)


@pytest.mark.parametrize("attend", [decode, ragged], ids=["decode", "ragged"])
def test_integers_scaled_by_token_are_exact_up_to_the_rounding_of_bfloat16(attend):
    call = make_call([(1, 33), (1, 70)] if attend is decode else [(9, 40), (20, 20)], **BY_TOKEN)

    attend(call.with_options(q=call.arguments["q"].astype(jnp.bfloat16)), tolerance=0.03)


def test_many_rows_of_queries_read_integers_scaled_by_token(monkeypatch):
    monkeypatch.setattr(attend, "KEYS_TOGETHER", 32)  # blocks of 48, pieces of 16

    run(make_call([(17, 100)], **{**BY_TOKEN, "page_size": 16}), blocks=Blocks(pages=3, buffers=3, queries=20, rows=40))


@pytest.mark.parametrize("page_size", [16, 128, 256])
def test_decoding_around_the_page_size_is_exact(page_size):
    lens = [(1, n) for n in (page_size - 1, page_size, page_size + 1)]

    decode(make_call(lens, **{**SMALL, "table_width": 2}, page_size=page_size, layout="tpu"))


def test_decoding_nothing_writes_nothing_and_reads_inside_its_arrays(monkeypatch):
    # The interpreter lets an index of -1 pass; the chip reads what lies before the array.
    ranges, to_range = [], interpreter_utils.to_range
    monkeypatch.setattr(
        interpreter_utils, "to_range", lambda transforms: ranges.append(to_range(transforms)) or ranges[-1]
    )

    decode(make_call([(1, 0), (1, 0)], **SMALL, layout="tpu"))

    indices = [i.start if isinstance(i, slice) else i for accessed in ranges for i in accessed]
    assert indices
    assert min(indices) >= 0


def test_decoding_without_new_keys_reads_what_is_there():
    call = make_call([(1, 40), (1, 17)], **SMALL, layout="tpu")
    scale = call.arguments["q"].shape[-1] ** -0.5
    _, pages = by_name(entry.paged_attention_tpu_interpreted)(**call.arguments, scale=scale, q_len=1)

    decode(call.with_options(k=None, v=None, pages=pages))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "dtype"),
    [(3, 3, 64, jnp.bfloat16), (7, 1, 80, jnp.bfloat16), (1, 1, 128, jnp.bfloat16), (16, 2, 256, jnp.float32)],
    ids=str,
)
def test_a_ragged_batch_is_exact_for_any_heads(num_heads, num_kv_heads, head_dim, dtype):
    sizes: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    call = make_call([(9, 30), (1, 3), (2, 2)], **{**SMALL, **sizes}, dtype=dtype, num_padding=1, layout="tpu")

    ragged(call, tolerance=0.03 if dtype == jnp.bfloat16 else 2e-5)


@pytest.mark.parametrize("execution", ["eager", "on_wait"])
def test_a_ragged_batch_is_exact_and_free_of_races(execution):
    ragged(make_call(RAGGED, **SMALL, num_padding=3, layout="tpu"), execution=execution)


def many_rows(call, **options):
    """64 rows of queries in pieces of 32: more than registers hold."""
    run(call, blocks=Blocks(pages=2, buffers=3, queries=32, rows=32), **options)


MANY_ROWS = [(33, 120), (3, 70)]


@pytest.mark.parametrize(("lens", "options"), [(MANY_ROWS, {}), ([(33, 120)], {"window": 40})], ids=str)
def test_many_rows_of_queries_are_exact_and_free_of_races(lens, options):
    many_rows(make_call(lens, **SMALL, num_padding=3, layout="tpu"), **options)


def test_blocks_of_more_keys_than_a_piece_has_are_exact(monkeypatch):
    monkeypatch.setattr(attend, "KEYS_TOGETHER", 32)  # blocks of 48, pieces of 16

    run(make_call([(17, 100)], **SMALL, layout="tpu"), blocks=Blocks(pages=3, buffers=3, queries=20, rows=40))


def test_a_ragged_batch_honours_window_soft_cap_and_sinks_together():
    call = make_call([(7, 23), (20, 50), (1, 30)], **SMALL, layout="tpu").with_freed_pages(10)

    ragged(call.with_options(sinks=np.array([-1, 0, 1, 2], np.float32)), window=10, softcap=0.5)


@pytest.mark.parametrize("page_dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_a_ragged_batch_over_narrow_pages_is_exact_up_to_the_rounding_of_bfloat16(page_dtype):
    narrow = narrow_pages(page_dtype)

    ragged(make_call([(9, 40), (20, 20)], **SMALL, **narrow, layout="tpu"), tolerance=0.03)


@pytest.mark.parametrize("sizes", [{**SMALL, "layout": "tpu"}, BY_TOKEN], ids=["float32", "int8 by token"])
def test_verifying_a_tree_of_drafts_is_exact(sizes):
    # Token 0 has two children, of which the first has two and the second one.
    tree = np.array([[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 0, 1, 0, 0, 0], [1, 1, 0, 1, 0, 0]])
    tree = np.concatenate([tree, [[1, 1, 0, 0, 1, 0], [1, 0, 1, 0, 0, 1]]]).astype(bool)
    call = make_call([(6, 35), (6, 6)], **sizes)
    words = np.concatenate([tree, tree]) @ (1 << np.arange(6, dtype=np.uint32))

    run(call.with_options(tree_mask=jnp.asarray(words[:, None], jnp.uint32)), q_len=6, trees=[tree, tree])


def test_blocks_that_would_split_a_tree_are_refused():
    call = make_call([(6, 19)], **SMALL, layout="tpu").with_options(tree_mask=jnp.ones((6, 1), jnp.uint32))

    with pytest.raises(ValueError, match=r"blocks\.queries=4 would split the 6 tokens .* take 6 or more"):
        run(call, q_len=6, blocks=Blocks(pages=2, buffers=2, queries=4))


@pytest.mark.parametrize("q_len", [1, None])
def test_a_plan_that_is_made_before_gives_the_same_bits(q_len):
    call = make_call([(1, 9), (1, 40)] if q_len else [(7, 23), (1, 17), (9, 40)], **SMALL, layout="tpu")
    statics = {"q_len": q_len, "implementation": "tpu_interpret"}

    def attend_by_plan(arguments: dict[str, Any]) -> Any:
        T, N, _ = arguments["q"].shape
        rows = AttentionCall(**{name: arguments[name] for name in ROWS}, **statics, scale=0.25)
        plan = plan_attention(arguments["pages"], rows, num_tokens=T, num_heads=N)
        assert plan is not None
        with mock.patch.object(entry, "plan_step", side_effect=AssertionError("made again")):
            return by_name(paged_attention)(**arguments, plan=plan, scale=0.25, **statics)

    planned = jax.jit(attend_by_plan)(call.arguments)

    attend = functools.partial(by_name(paged_attention), scale=0.25, **statics)
    jax.tree.map(np.testing.assert_array_equal, planned, jax.jit(attend)(**call.arguments))


def test_a_plan_for_other_block_sizes_is_refused():
    call = make_call([(7, 23)], **SMALL, layout="tpu")
    (T, _, _), (pool,) = call.arguments["q"].shape, call.arguments["pages"].arrays
    rows = AttentionCall(**{name: call.arguments[name] for name in ROWS}, scale=0.25)
    sizes = {"num_tokens": T, "num_kv_heads": 2, "num_groups": 2, "tiling": Blocks(pages=2, buffers=2, queries=4)}
    plan = entry.plan_step(pool, rows, **sizes)

    with pytest.raises(ValueError, match=r"plan has items of 4 queries but Blocks\(.*queries=2"):
        run(call, plan=plan, blocks=Blocks(pages=2, buffers=2, queries=2))


@pytest.mark.parametrize("sizes", [{**SMALL, "layout": "tpu"}, BY_TOKEN], ids=["float32", "int8 by token"])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("q_len", [1, 3])
def test_a_neighbour_of_nan_values_makes_no_result_nan(q_len, window, sizes):
    kv_lens = np.array([64, 3, 60, 17, 5, 100])
    call, poisoned = make_call([(q_len, n) for n in kv_lens], **sizes), [0, 2]
    slots = np.concatenate([call.slots[i] for i in poisoned])
    values = np.full((len(slots), 2, 16), np.nan, np.float32)
    pages = write(call.arguments["pages"], np.zeros_like(values), values, slots)
    rows = np.repeat(np.arange(len(kv_lens)), q_len)
    call = call.with_options(pages=pages, v=call.arguments["v"].at[np.isin(rows, poisoned)].set(np.nan))

    blocks = Blocks(pages=4, buffers=3, queries=q_len)
    attend = functools.partial(by_name(entry.paged_attention_tpu_interpreted), scale=0.25, q_len=q_len, window=window)
    out, _ = jax.jit(functools.partial(attend, blocks=blocks))(**call.arguments)

    others = ~np.isin(rows, poisoned)
    expected = expected_output(call, 0.25, window=window)
    np.testing.assert_allclose(np.asarray(out)[others], expected[others], rtol=2e-5, atol=2e-5)
    assert np.isnan(out[~others]).all()


FILES = (items, attend, fetch, append, rows, kernel, entry)
# None that makes a kernel wait for what never comes: the interpreter would wait as well.
MUTATIONS = {
    "a dropped wait for a block": ("pltpu.make_async_copy(part, part, s.kv_arrived.at[slot]).wait()", "pass"),
    "a block fetched into another buffer": (
        "s.kv.at[slot, :, pl.ds(p * page_tiles, size)]",
        "s.kv.at[lax.rem(slot + 1, NB), :, pl.ds(p * page_tiles, size)]",
    ),
    "a dropped wait for queries": ("for copy in fetch.item_copies(i):", "for copy in ():"),
    "a dropped wait for a result": ("out_copy(i - 2).wait()", "pass"),
    "a dropped wait for a written tile": ("for copy in copies(i - 2):", "for copy in ():"),
    "a new token one slot too early": ("- lax.rem(position, tile)", "- lax.rem(position - 1, tile)"),
    "a tail left as it was": (
        "jnp.where(row_in_tile == 0, new, jnp.zeros_like(old))",
        "jnp.where(row_in_tile == 0, new, old)",
    ),
    "the end of a buffer left as it was": ("zero_values(slot, end, block_tiles)", "pass"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_of_decoding_is_caught(name):
    kernels = mutant(FILES, *MUTATIONS[name])
    call = make_call([(1, n) for n in (40, 17, 70, 3, 33, 9)], **SMALL, layout="tpu")

    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
        decode(call, kernels=kernels, execution="on_wait")


RAGGED_MUTATIONS = {
    "a dropped wait for appended tiles": ("pl.loop(0, s.num_tiles[0])(lambda n: copy(n).wait())", "pass"),
    "a tile of old tokens overwritten": ("jnp.where(tiles.is_old[:", "jnp.where(jnp.zeros_like(tiles.is_old)[:"),
    "results that overwrite those of the next row": ("jnp.clip(q_lens[row] - first, 0, Q)", "jnp.full_like(first, Q)"),
    "queries of another head": ("= s.by_token[c, :, head * G + g]", "= s.by_token[c, :, head * G]"),
    "a dropped wait for a result": ("out_copy(i - 2).wait()", "pass"),
    "queries that see what follows them": ("seen = position <= own", "seen = position <= own + 1"),
}


MANY_ROWS_MUTATIONS = {
    "weights that are replaced before they are used": (
        "            finish(n - 1)\n            go_on(n)\n",
        "            go_on(n)\n            finish(n - 1)\n",
    ),
    "scores that are replaced before they are used": (
        "            go_on(n)\n            begin(n + 1)\n",
        "            begin(n + 1)\n            go_on(n)\n",
    ),
    "a block taken for one that all queries see": (
        "sees_all = (b + 1) * block <= s.start[i]",
        "sees_all = b * block <= s.start[i]",
    ),
}


@pytest.mark.parametrize("name", MANY_ROWS_MUTATIONS)
def test_a_mutation_of_attention_of_many_rows_is_caught(name):
    kernels = mutant(FILES, *MANY_ROWS_MUTATIONS[name])

    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
        many_rows(make_call([(33, 80)], **SMALL, layout="tpu"), kernels=kernels)


@pytest.mark.parametrize("name", RAGGED_MUTATIONS)
def test_a_mutation_of_ragged_attention_is_caught(name):
    kernels = mutant(FILES, *RAGGED_MUTATIONS[name])
    call = make_call([(7, 23), (9, 40)], **SMALL, layout="tpu")

    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
        ragged(call, kernels=kernels, execution="on_wait")


BY_TOKEN_MUTATIONS = {
    "scales fetched into another buffer": ("s.scales.at[slot, p], s.kv", "s.scales.at[lax.rem(slot + 1, NB), p], s.kv"),
    "a new scale one slot too early": ("- lax.rem(position, page)", "- lax.rem(position - 1, page)"),
    "scales of an earlier row left after the end": ("zero_scales(slot, end, block_tiles)", "pass"),
    "values worth what keys are": ("weights * scales(piece, 1)", "weights * scales(piece, 0)"),
}


@pytest.mark.parametrize("name", BY_TOKEN_MUTATIONS)
def test_a_mutation_of_attention_to_integers_scaled_by_token_is_caught(name):
    kernels = mutant(FILES, *BY_TOKEN_MUTATIONS[name])

    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
        decode(make_call([(1, n) for n in (128, 17, 70)], **BY_TOKEN), kernels=kernels, execution="on_wait")
