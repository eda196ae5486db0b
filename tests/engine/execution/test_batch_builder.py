"""Every step has a shape that was planned, and the arrays say exactly what the step is."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.config import EngineConfig, SamplingParams
from jaxinfer.engine.execution.batch_builder import BatchBuilder, sampling_of_requests
from jaxinfer.engine.execution.compiled_steps import choose_bucket
from jaxinfer.engine.request.request import Request
from jaxinfer.engine.scheduling.step import Chunk, Chunks, Step
from jaxinfer.model.batch import PADDING_SLOT
from jaxinfer.plan.step_shapes import (
    Bucket,
    find_bucket,
    fitting_size,
    max_batched_tokens,
    max_mixed_tokens,
    plan_buckets,
)

PAGE_SIZE = 16
TABLE_WIDTH = 8


def make_chunk(start: int, num_tokens: int, first_page: int = 0, sampling: SamplingParams | None = None) -> Chunk:
    """A chunk of a request whose token at position i is 100 + i, on consecutive pages from `first_page`."""
    num_pages = -(-(start + num_tokens) // PAGE_SIZE)
    tokens = [100 + i for i in range(start + num_tokens)]
    sampling = sampling or SamplingParams()
    request = Request(0, tokens, sampling, seed=first_page, max_tokens=1, stop_token_ids=(), detokenizer=None)
    request.table.first.pages = tuple(range(first_page, first_page + num_pages))
    return Chunk(request, start, num_tokens)


def make_step(lengths: list[tuple[int, int]]) -> Step:
    return Step(Chunks.of([make_chunk(*pair, first_page=10 * i) for i, pair in enumerate(lengths)]))


configs = st.integers(1, 48).flatmap(
    lambda rows: st.integers(rows, 200).map(
        lambda tokens: EngineConfig(max_num_seqs=rows, max_num_batched_tokens=tokens)
    )
)


@st.composite
def configs_and_steps(draw):
    """A configuration and any step possible under it: rows of at least one token, within the budget."""
    config = draw(configs)
    num_rows = draw(st.integers(1, config.max_num_seqs))
    budget = draw(st.integers(num_rows, config.max_num_batched_tokens))
    cuts = draw(st.lists(st.integers(0, budget - num_rows), min_size=num_rows - 1, max_size=num_rows - 1))
    edges = [0, *sorted(cuts), budget - num_rows]
    q_lens = [1 + end - start for start, end in itertools.pairwise(edges)]
    starts = draw(st.lists(st.integers(0, 100), min_size=num_rows, max_size=num_rows))
    return config, make_step(list(zip(starts, q_lens, strict=True)))


@given(configs_and_steps())
def test_every_step_fits_a_planned_bucket(case):
    config, step = case

    bucket = choose_bucket(plan_buckets(config), step)

    assert bucket.num_tokens >= step.num_tokens
    assert bucket.num_rows >= len(step.chunks)
    assert bucket.is_decode == step.is_decode


@given(configs_and_steps())
def test_no_smaller_bucket_would_hold_the_step(case):
    config, step = case
    buckets = plan_buckets(config)

    chosen = choose_bucket(buckets, step)

    assert not [
        bucket
        for bucket in buckets
        if bucket.is_decode == step.is_decode
        and step.num_tokens <= bucket.num_tokens < chosen.num_tokens
        and len(step.chunks) <= bucket.num_rows
    ]


@given(configs_and_steps())
@settings(max_examples=200)
def test_the_batch_describes_the_chunks_of_the_step_and_nothing_else(case):
    config, step = case
    bucket = choose_bucket(plan_buckets(config), step)

    batch, _ = BatchBuilder(page_size=PAGE_SIZE, table_width=20).build(step, bucket)

    end = 0
    for row, chunk in enumerate(step.chunks):
        start, end = end, end + chunk.num_tokens
        positions = range(chunk.start, chunk.start + chunk.num_tokens)
        pages = chunk.request.table.pages
        assert (batch.cu_q_lens[row], batch.cu_q_lens[row + 1]) == (start, end)
        assert batch.kv_lens[row] == positions.stop
        assert batch.tokens[start:end].tolist() == [100 + p for p in positions]
        assert batch.positions[start:end].tolist() == list(positions)
        assert batch.slot_mapping[start:end].tolist() == [pages[p // 16] * 16 + p % 16 for p in positions]
        assert batch.block_tables[row, : len(pages)].tolist() == list(pages)
    assert (batch.slot_mapping[end:] == PADDING_SLOT).all()
    assert (batch.kv_lens[len(step.chunks) :] == 0).all()


@given(configs)
def test_buckets_are_few_and_distinct(config):
    buckets = plan_buckets(config)

    # 1 row, 8 rows, 128 tokens, and the limits themselves, which are at most 48 rows and 200 tokens here.
    assert len(buckets) == len(set(buckets)) <= 3 + 2


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens", "decode", "prefill"),
    [
        (32, 512, [1, 8, 32], [128, 512]),
        (1, 1, [1], [1]),
        (3, 40, [1, 3], [40]),
        (12, 100, [1, 8, 12], [100]),
        (100, 1600, [1, 8, 64, 100], [128, 200, 1024, 1600]),
    ],
)
def test_the_buckets_of_a_configuration_are_these(max_num_seqs, max_num_batched_tokens, decode, prefill):
    config = EngineConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)

    buckets = plan_buckets(config)

    assert [b.num_tokens for b in buckets if b.is_decode] == decode
    assert [b.num_tokens for b in buckets if not b.is_decode] == prefill


def test_a_prefill_beside_decoding_rows_has_a_bucket_of_its_own():
    buckets = plan_buckets(EngineConfig(max_mixed_tokens=64, max_num_batched_tokens=512))

    assert [b.num_tokens for b in buckets if not b.is_decode] == [64, 128, 512]


@pytest.mark.parametrize(
    ("platform", "limits", "num_tokens"),
    [
        ("cpu", {}, (512, 128)),
        ("tpu", {}, (2048, 2048)),
        ("cpu", {"max_num_seqs": 200}, (512, 400)),
        ("tpu", {"max_num_seqs": 600}, (2048, 2048)),
        ("tpu", {"max_num_seqs": 3000}, (3000, 3000)),
        ("cpu", {"max_mixed_tokens": 700}, (700, 700)),
        ("cpu", {"max_num_batched_tokens": 40}, (40, 40)),
        ("tpu", {"max_num_batched_tokens": 40}, (40, 40)),
    ],
)
def test_a_step_has_as_many_tokens_as_the_device_likes_and_every_row_needs(monkeypatch, platform, limits, num_tokens):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    config = EngineConfig(**limits)

    assert (max_batched_tokens(config), max_mixed_tokens(config)) == num_tokens


def test_a_decode_bucket_has_one_token_per_row():
    buckets = plan_buckets(EngineConfig())

    assert all(b.num_tokens == b.num_rows for b in buckets if b.is_decode)


@given(configs, st.integers(1, 15), st.data())
def test_rows_that_have_room_for_drafts_have_a_bucket_to_verify_them(config, max_drafts, data):
    num_rows = data.draw(st.integers(1, config.max_num_seqs))
    most = min(max_mixed_tokens(config) - num_rows, num_rows * max_drafts)
    chunks = [make_chunk(3, 1) for _ in range(num_rows)]
    for i in range(data.draw(st.integers(0, most))):
        chunks[i % num_rows].drafts = [*chunks[i % num_rows].drafts, 0]
    step = Step(Chunks.of(chunks))

    bucket = choose_bucket(plan_buckets(config, max_drafts), step)

    assert bucket.num_tokens >= step.num_tokens
    assert bucket.num_rows >= num_rows
    assert bucket.is_verify == step.is_verify


def test_a_shape_that_was_not_planned_is_named():
    with pytest.raises(RuntimeError, match="no bucket for verify steps holds 7 tokens in 3 rows; there are decode 8"):
        find_bucket((Bucket(True, 8, 8),), 7, 3, is_verify=True)
    with pytest.raises(RuntimeError, match=r"no size of \[1, 8\] holds 9"):
        fitting_size([1, 8], 9)


def test_padding_rows_of_a_decode_batch_own_their_padding_token():
    batch, _ = BatchBuilder(page_size=PAGE_SIZE, table_width=TABLE_WIDTH).build(make_step([(3, 1)]), Bucket(True, 4, 4))

    assert batch.cu_q_lens.tolist() == [0, 1, 2, 3, 4]


def test_padding_rows_of_a_prefill_batch_are_empty():
    batch, _ = BatchBuilder(page_size=PAGE_SIZE, table_width=TABLE_WIDTH).build(
        make_step([(0, 5)]), Bucket(False, 16, 4)
    )

    assert batch.cu_q_lens.tolist() == [0, 5, 5, 5, 5]


def test_each_row_is_sampled_as_its_request_asks():
    params = [
        SamplingParams(temperature=0.5, top_k=3, log_probs=2),
        SamplingParams(temperature=0, top_p=0.25, min_p=0.5),
    ]
    chunks = Chunks.of([make_chunk(0, 2, 5 + i, sampling) for i, sampling in enumerate(params)])

    _, sampling = BatchBuilder(page_size=PAGE_SIZE, table_width=TABLE_WIDTH).build(Step(chunks), Bucket(False, 16, 3))

    assert sampling.temperature.tolist() == [0.5, 0, 0]
    assert sampling.top_k.tolist() == [3, 0, 0]
    assert sampling.top_p.tolist() == [1, 0.25, 1]
    assert sampling.min_p.tolist() == [0, 0.5, 0]
    assert sampling.num_log_probs.tolist() == [2, 0, 0]
    assert sampling.seeds.tolist() == [[0, 5], [0, 6], [0, 0]]


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**64 - 1])
def test_a_seed_keeps_all_its_64_bits(seed):
    chunk = make_chunk(0, 2)
    chunk.request.seed = seed

    step = Step(Chunks.of([chunk]))

    _, sampling = BatchBuilder(page_size=PAGE_SIZE, table_width=TABLE_WIDTH).build(step, Bucket(False, 16, 2))

    high, low = sampling.seeds[0].tolist()
    assert high * 2**32 + low == seed


@pytest.mark.parametrize("bucket", plan_buckets(EngineConfig()), ids=lambda bucket: bucket.name)
def test_shapes_and_types_depend_on_the_bucket_alone(bucket):
    empty = BatchBuilder(page_size=PAGE_SIZE, table_width=TABLE_WIDTH).build(make_step([]), bucket)
    num_tokens = 1 if bucket.is_decode else bucket.num_tokens // 2
    step = make_step([(0, num_tokens // 2 or 1)])

    full = BatchBuilder(page_size=PAGE_SIZE, table_width=20).build(step, bucket)[0], empty[1]

    for name in ("tokens", "positions", "slot_mapping", "cu_q_lens", "kv_lens"):
        ours, theirs = getattr(empty[0], name), getattr(full[0], name)
        assert (ours.shape, ours.dtype) == (theirs.shape, np.dtype("int32"))


def test_steps_whose_rows_use_no_processors_share_theirs_on_the_device():
    sizes = {"num_rows": 2, "max_listed_tokens": 4, "vocab_size": 0, "custom": ()}

    first, second = (sampling_of_requests([], **sizes).processors for _ in range(2))

    assert first is second
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(first))


def test_decode_steps_of_the_same_rows_copy_their_sampling_parameters_to_the_device_once():
    builder = BatchBuilder(page_size=PAGE_SIZE, table_width=TABLE_WIDTH)
    chunks = Chunks.of([make_chunk(3, 1, sampling=SamplingParams(temperature=0.5)), make_chunk(5, 1, 4)])

    sampling = [builder.build(Step(chunks), Bucket(True, 2, 2))[1] for _ in range(4)]

    assert isinstance(sampling[0].temperature, np.ndarray)  # rows that change with each step are not worth the call
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(sampling[2]))
    assert sampling[3] is sampling[2]
    assert sampling[2].temperature.tolist() == sampling[0].temperature.tolist() == [0.5, 1]
