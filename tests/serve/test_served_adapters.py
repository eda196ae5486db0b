"""Adapters as models of the server, and of the lines of its batches and of jobs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from jaxinfer.batch_job import run_batch
from jaxinfer.config import SamplingParams
from tests.adapters import save_adapter
from tests.engine.engines import small_async_engine, small_engine
from tests.serve.servers import serving

GREEDY = SamplingParams(temperature=0, max_tokens=6)
BODY: dict[str, Any] = {"prompt": [5, 6, 7], "temperature": 0, "max_tokens": 6, "logprobs": 0}
SLOTS = {"max_adapters": 2, "max_adapter_rank": 8}


@pytest.fixture(scope="module")
def folders(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {name: save_adapter(folder / name, checkpoint, seed=i) for i, name in enumerate("ab")}


@pytest.fixture(scope="module")
def adapted(checkpoint, folders):
    llm = small_engine(checkpoint, **SLOTS)
    for name, folder in folders.items():
        llm.load_adapter(name, folder)
    return llm


@pytest.fixture(scope="module")
def expected(adapted):
    """The log-probabilities of the completion of each model."""
    names = {"small": None, "a": "a", "b": "b"}
    completions = {
        model: adapted.generate([[5, 6, 7]], GREEDY, show_progress=False, adapter=name)[0]
        for model, name in names.items()
    }
    return {model: list(completion.log_probs) for model, completion in completions.items()}


@pytest.fixture(scope="module")
def address(checkpoint, folders):
    llm = small_async_engine(checkpoint, **SLOTS)

    async def load():
        for name, folder in folders.items():
            await llm.load_adapter(name, folder)
        with pytest.raises(ValueError, match="'x' is not loaded"):
            await llm.unload_adapter("x")

    asyncio.run(load())
    with serving(llm) as (_, address):
        yield address


def test_a_request_names_an_adapter_as_its_model(address, expected):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        for model, log_probs in expected.items():
            answer = client.completions.create(model=model, **BODY)
            assert answer.model == model
            assert answer.choices[0].logprobs.token_logprobs == pytest.approx(log_probs, abs=1e-6)
            stream = client.completions.create(model=model, stream=True, **BODY)
            pieces = [piece for piece in stream if piece.choices]
            assert {piece.model for piece in pieces} == {model}
        assert [card.id for card in client.models.list()] == ["small", "other", "a", "b"]
        assert client.models.retrieve("a").id == "a"
        with pytest.raises(
            openai.NotFoundError, match="the model 'c' does not exist; this server has small, other, a, b"
        ):
            client.completions.create(model="c", **BODY)
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "temperature": 0, "logprobs": True}
        answers = [client.chat.completions.create(model=model, **chat) for model in expected]
        assert len({str(answer.choices[0].logprobs) for answer in answers}) == 3
    vectors = [httpx.post(f"{address}/v1/embeddings", json={"model": m, "input": [5, 6]}).json() for m in expected]
    assert [vector["model"] for vector in vectors] == list(expected)
    assert len({str(vector["data"]) for vector in vectors}) == 3


def test_the_lines_of_a_job_name_adapters(checkpoint, adapted, expected, tmp_path):
    ours = [
        {"custom_id": f"line {name}", "prompt": [5, 6, 7], "adapter": name, **common()}
        for name in ("a", "b", None, "x")
    ]
    theirs = [
        {"custom_id": f"of OpenAI {model}", "url": "/v1/completions", "body": {"model": model, **BODY}}
        for model in (checkpoint.name, str(checkpoint), "a", "b", "poet")
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in ours + theirs))

    summary = run_batch(adapted, tmp_path / "in.jsonl", tmp_path / "out.jsonl", show_progress=False)

    assert (summary.num_completed, summary.num_errors) == (7, 2)
    records = {r["custom_id"]: r for r in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    for model, log_probs in expected.items():
        name, named = (None, checkpoint.name) if model == "small" else (model, model)
        assert records[f"line {name}"]["log_probs"] == pytest.approx(log_probs, abs=1e-6)
        choice = records[f"of OpenAI {named}"]["response"]["body"]["choices"][0]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(log_probs, abs=1e-6)
    assert "adapter='x' is not loaded" in str(records["line x"]["error"])
    (choice,) = records[f"of OpenAI {checkpoint}"]["response"]["body"]["choices"]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected["small"], abs=1e-6)
    assert records["of OpenAI poet"]["response"]["status_code"] == 404
    (error,) = records["of OpenAI poet"]["response"]["body"].values()
    known = f"the model 'poet' does not exist; this job has {checkpoint.name}, {checkpoint}, a, b; give served_names"
    assert error["message"].startswith(known)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert records["line a"]["made_by"]["adapter"].startswith("a=")
    assert "adapter" not in records["line None"]["made_by"]


def common() -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": 6}


def test_another_adapter_of_the_same_name_does_not_go_on_with_a_job(checkpoint, folders, adapted, tmp_path):
    (tmp_path / "in.jsonl").write_text(json.dumps({"custom_id": "a", "prompt": [5], "adapter": "a", "max_tokens": 2}))
    files = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    run_batch(adapted, *files, show_progress=False)
    other = small_engine(checkpoint, **SLOTS)
    other.load_adapter("a", folders["b"])
    other.load_adapter("b", folders["a"])

    with pytest.raises(ValueError, match="was made with adapter=a=.*, and this run has adapter=a="):
        run_batch(other, *files, show_progress=False)
