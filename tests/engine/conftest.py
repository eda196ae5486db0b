"""One small engine for all tests that need no special one; every test has to leave it idle."""

import pytest

from jaxinfer.engine.execution.compiled_steps import CompileCounter
from tests.engine.endless_engines import ENDLESS
from tests.engine.engines import (
    crowded_engine,
    poison_cache,
    require_idle,
    save_small_checkpoint,
    small_engine,
)


@pytest.fixture(autouse=True)
def no_request_waits_for_a_compiler(request):
    before = CompileCounter.total
    yield
    # Pallas' interpreter compiles as it goes.
    assert request.config.getoption("--tpu-kernels") or CompileCounter.total == before


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return save_small_checkpoint(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def shared_llm(checkpoint):
    return small_engine(checkpoint, max_prompt_log_probs=3)


@pytest.fixture(scope="session")
def crowded_llm(checkpoint):
    return crowded_engine(checkpoint)


@pytest.fixture(scope="session")
def looping_llm(checkpoint):
    """Up to 4 decode steps in a dispatch, requests that may be endless, fewer pages than they want, all poisoned."""
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 5, "num_pages": 6, **ENDLESS}
    limits["max_prompt_log_probs"] = 3
    llm = small_engine(checkpoint, **limits, decode_loop_steps=4)
    poison_cache(llm)
    return llm


@pytest.fixture(scope="session")
def mute_llm(checkpoint, tmp_path_factory):
    """Without a tokenizer, and with 32 slots where a request may have 96 tokens."""
    folder = tmp_path_factory.mktemp("mute")
    for file in checkpoint.iterdir():
        if file.name != "tokenizer.json":
            (folder / file.name).symlink_to(file)
    return small_engine(folder, num_pages=2, max_num_seqs=2, max_num_batched_tokens=16)


@pytest.fixture
def llm(shared_llm):
    """The shared engine, before and after which no request is left and no page is taken."""
    yield shared_llm
    require_idle(shared_llm)
