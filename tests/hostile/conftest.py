"""A few engines for all hostile tests of a process; every case has to leave them idle."""

import asyncio

import pytest

from tests.engine.engines import save_small_checkpoint, small_async_engine, small_engine


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return save_small_checkpoint(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def llm(checkpoint):
    return small_engine(checkpoint, max_prompt_log_probs=3)


@pytest.fixture(scope="session")
def async_llm(checkpoint):
    llm = small_async_engine(checkpoint, max_prompt_log_probs=3)
    yield llm
    asyncio.run(llm.close())
