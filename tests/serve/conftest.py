"""A small engine, and a server with its twin; every test has to leave them idle."""

import httpx
import openai
import pytest

from jaxinfer.serve.batches.file_store import FileStore
from tests.engine.engines import save_small_checkpoint, small_async_engine, small_engine
from tests.serve.servers import WAIT, serving, until

LIMITS = {"max_prompt_log_probs": 3, "sampling_log_probs": True}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return save_small_checkpoint(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def llm(checkpoint):
    return small_engine(checkpoint, **LIMITS)


@pytest.fixture(scope="session")
def address(checkpoint, tmp_path_factory):
    store = FileStore(tmp_path_factory.mktemp("files"), max_file_bytes=2**20)
    with serving(small_async_engine(checkpoint, **LIMITS), store=store) as (_, address):
        yield address


@pytest.fixture(scope="session")
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def http(address):
    with httpx.Client(base_url=address, timeout=300) as http:
        yield http


@pytest.fixture
def stays_idle(http):
    yield
    idle = ('vllm:num_requests_running{model_name="small"} 0.0', 'jaxinfer:pages{model_name="small",state="owned"} 0.0')

    def is_idle() -> bool:
        metrics = http.get("/metrics").text
        return all(line in metrics for line in idle)

    until(is_idle)  # the engine drops a request one step after its client has gone


@pytest.fixture
def served(checkpoint):
    """A server of its own, and its engine."""
    llm = small_async_engine(checkpoint, max_waiting=2)
    with serving(llm, max_body_bytes=10_000) as (server, address), httpx.Client(base_url=address, timeout=WAIT) as http:
        yield llm, server, http
