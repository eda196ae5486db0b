"""A request that is saved and restored yields what it would have yielded, bit for bit."""

from __future__ import annotations

import importlib.util
import os
import re
import weakref

import pytest

from jaxinfer.atomic_file import write_checked
from jaxinfer.config import SamplingParams
from jaxinfer.text.grammar import GrammarCompiler
from tests.engine.branching import BY_KIND, PROMPT, SEEDED, alone, begin, run_for
from tests.engine.engines import (
    ScriptedDrafter,
    completions_of,
    content_of,
    drafts_from,
    drain,
    poison_cache,
)
from tests.engine.probe import branches_of, scheduler_of


@pytest.fixture
def llm(llm):
    """The shared engine with nothing in its cache that could be found or used by mistake."""
    poison_cache(llm)
    return llm


@BY_KIND
def test_a_request_from_a_file_goes_on_where_it_was(llm, params, tmp_path):
    expected = alone(llm, params)
    request_id = begin(llm, params, 20)
    llm.save(request_id, tmp_path / "request")
    assert content_of(completions_of(drain(llm))[request_id]) == content_of(expected), "saving changes nothing"
    poison_cache(llm)
    before = llm.metrics()

    restored_id = llm.restore(tmp_path / "request")

    assert content_of(completions_of(drain(llm))[restored_id]) == content_of(expected)
    after = llm.metrics()
    assert (after.num_prefill_tokens, after.num_output_tokens) == (
        before.num_prefill_tokens,
        before.num_output_tokens + 20,
    )


@BY_KIND
def test_another_engine_goes_on_with_the_request_from_a_file(llm, crowded_llm, params, tmp_path):
    expected = alone(llm, params)
    request_id = begin(llm, params, 20)
    llm.save(request_id, tmp_path / "request")
    llm.abort(request_id)
    llm.step()

    with drafts_from(crowded_llm, ScriptedDrafter(0.7, [expected])):
        restored = crowded_llm.restore(tmp_path / "request")
        run_for(crowded_llm, restored, 25)
        crowded_llm.rewind(restored, 8)
        branch = crowded_llm.fork(restored)
        completions = completions_of(drain(crowded_llm))

    assert content_of(completions[restored]) == content_of(expected)
    assert completions[branch].token_ids[:17] == expected.token_ids[:17]
    assert crowded_llm.metrics().num_owned_pages == 0


def test_a_restored_request_and_its_branches_free_the_contents_of_the_file(llm, tmp_path):
    request_id = begin(llm, SEEDED, 20)
    llm.save(request_id, tmp_path / "request")
    llm.abort(request_id)
    poison_cache(llm)
    restored_id = llm.restore(tmp_path / "request")
    branch_id = llm.fork(restored_id)
    contents = [weakref.ref(content) for content in scheduler_of(llm).find(restored_id).table.saved[0].values()]

    for i in (restored_id, branch_id):
        run_for(llm, i, 21)

    assert len(contents) == 3
    assert not any(content() is not None for content in contents)
    for i in (restored_id, branch_id):
        llm.abort(i)
    drain(llm)


def test_a_request_that_was_not_computed_yet_is_saved_as_well(llm, tmp_path):
    request_id = llm.add(PROMPT, SEEDED)
    llm.save(request_id, tmp_path / "request")
    llm.abort(request_id)

    restored_id = llm.restore(tmp_path / "request")

    assert content_of(completions_of(drain(llm))[restored_id]) == content_of(alone(llm, SEEDED))


def test_a_restored_request_is_saved_forked_and_set_back_before_it_runs(llm, tmp_path):
    expected = alone(llm, SEEDED)
    request_id = begin(llm, SEEDED, 20)
    llm.save(request_id, tmp_path / "first")
    llm.abort(request_id)
    poison_cache(llm)

    first = llm.restore(tmp_path / "first")
    llm.save(first, tmp_path / "second")
    second = llm.restore(tmp_path / "second")
    llm.rewind(second, 7)
    branch = llm.fork(first)

    completions = completions_of(drain(llm))
    assert content_of(completions[first]) == content_of(completions[second]) == content_of(expected)
    assert completions[branch].token_ids[:20] == expected.token_ids[:20]


TEXTS = {
    "stop": {"stop": ["never met", "zz"], "max_tokens": 30},
    "special": {"skip_special_tokens": False, "logit_bias": {0: 3.0}, "ignore_eos": True, "max_tokens": 30},
    "regex": {"regex": "([a-c]{3}-){4}[0-9]", "max_tokens": 30},
    "json_schema": {
        "json_schema": {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 9},
        "max_tokens": 30,
    },
}
HAS_LLGUIDANCE = importlib.util.find_spec("llguidance") is not None
PLAIN = ("stop", "special")
TESTED = [name for name in TEXTS if HAS_LLGUIDANCE or name in PLAIN]


@pytest.mark.parametrize("name", TESTED)
def test_text_and_structure_go_on_from_where_they_were(llm, tmp_path, name, monkeypatch):
    params = SamplingParams(**TEXTS[name], seed=3)
    expected = alone(llm, params)
    request_id = begin(llm, params, 7)
    llm.save(request_id, tmp_path / "request")
    with monkeypatch.context() as patched:
        patched.setattr(GrammarCompiler, "compile", lambda *_: pytest.fail("compiled again"))
        branch_id = llm.fork(request_id, seed=3)
        llm.rewind(request_id, 4)
    restored_id = llm.restore(tmp_path / "request")

    completions = completions_of(drain(llm))

    assert content_of(completions[request_id]) == content_of(completions[restored_id]) == content_of(expected)
    branch = completions[branch_id]
    assert branch.text == llm.tokenizer.decode(branch.token_ids, skip_special_tokens=params.skip_special_tokens)
    assert name in PLAIN or re.match(r"([a-c]{3}-)+|\{\s*\"", branch.text)


def test_terms_and_parameters_survive_a_file(llm, tmp_path):
    params = SamplingParams(
        max_tokens=9, logit_bias={5: 1.5}, bad_words=[[1, 2]], stop=["q"], logits_processors={"turns": 2.0}, top_p=0.9
    )
    request_id = llm.add(PROMPT, params, priority="batch", tenant="t", deadline=1000.0, cache_salt="s")
    llm.save(request_id, tmp_path / "request")

    restored = scheduler_of(llm).find(llm.restore(tmp_path / "request"))

    request = scheduler_of(llm).find(request_id)
    assert restored.sampling == params
    for name in ("seed", "sample_index", "max_tokens", "stop_token_ids", "priority", "tenant", "cache_salt"):
        assert getattr(restored, name) == getattr(request, name)
    assert 900 < restored.time_limit <= 1000
    assert restored.keys.key(0, PROMPT) == request.keys.key(0, PROMPT)
    for i in (request_id, restored.request_id):
        llm.abort(i)
    llm.step()


# ---- files that are no good, and those that cannot be written


def flip_a_bit(file, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(bytes(content))


DAMAGES = {
    "digest": lambda file: flip_a_bit(file, 0),
    "head": lambda file: flip_a_bit(file, 50),
    "page": lambda file: flip_a_bit(file, -1),
    "cut off": lambda file: os.truncate(file, 1000),
    "empty": lambda file: os.truncate(file, 0),
}


def test_what_a_process_that_was_killed_left_of_a_file_is_removed_when_it_is_written_again(llm, tmp_path):
    begun, others = tmp_path / f".request.{'0' * 32}", tmp_path / f".request2.{'0' * 32}"
    for path in (begun, others):
        path.touch()
        os.utime(path, (0, 0))
    request_id = begin(llm, SEEDED, 5)

    llm.save(request_id, tmp_path / "request")

    assert sorted(path.name for path in tmp_path.iterdir()) == [others.name, "request"]
    llm.abort(request_id)
    drain(llm)


def test_an_interrupt_while_a_file_is_written_leaves_nothing(llm, tmp_path):
    def parts():
        yield b"begun"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checked(tmp_path / "request", parts())

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_what_is_no_regular_file_is_neither_read_nor_replaced(llm, tmp_path, kind):
    path, request_id = tmp_path / "request", begin(llm, SEEDED, 5)
    os.mkfifo(path) if kind == "pipe" else path.mkdir()

    for call in (llm.restore, lambda path: llm.save(request_id, path)):
        with pytest.raises(ValueError, match="request is no regular file; give the path of one, or of none yet"):
            call(path)

    assert path.is_fifo() or path.is_dir()
    llm.abort(request_id)
    drain(llm)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_refused_and_everything_else_goes_on(llm, tmp_path, damage):
    expected = alone(llm, SEEDED)
    request_id = begin(llm, SEEDED, 5)
    llm.save(request_id, tmp_path / "request")
    damage(tmp_path / "request")

    with pytest.raises(ValueError, match="request is cut off or changed"):
        llm.restore(tmp_path / "request")

    assert list(completions_of(drain(llm))) == [request_id]
    assert content_of(alone(llm, SEEDED)) == content_of(expected)


@pytest.mark.parametrize("aspect", ["weights", "model", "dtype", "page_size", "platform", "versions"])
def test_a_request_of_another_engine_is_refused_by_what_is_different(llm, tmp_path, monkeypatch, aspect):
    request_id = begin(llm, SEEDED, 5)
    llm.save(request_id, tmp_path / "request")
    llm.abort(request_id)
    llm.step()
    monkeypatch.setitem(branches_of(llm)._identity, aspect, "other")

    with pytest.raises(ValueError, match=f"was saved with {aspect}=.*here it is 'other'.*restore it with an LLM like"):
        llm.restore(tmp_path / "request")


def test_a_file_that_cannot_be_written_leaves_the_one_before(llm, tmp_path):
    request_id = begin(llm, SEEDED, 5)
    with pytest.raises(FileNotFoundError):
        llm.save(request_id, tmp_path / "no folder" / "request")

    assert completions_of(drain(llm))[request_id].finish_reason == "length"
