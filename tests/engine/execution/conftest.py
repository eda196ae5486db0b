"""An engine as users have it, which compiles everything beforehand."""

import pytest

from tests.engine.engines import ready_engine, require_idle


@pytest.fixture(scope="session")
def ready_llm(checkpoint):
    return ready_engine(checkpoint, max_prompt_log_probs=3)


@pytest.fixture
def llm(ready_llm):
    """This engine, before and after which no request is left and no page is taken."""
    yield ready_llm
    require_idle(ready_llm)
