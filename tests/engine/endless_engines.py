"""Engines whose requests may be endless."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from jaxinfer.engine.assembly import plan_window
from jaxinfer.engine.execution.page_copier import PageCopier
from jaxinfer.engine.frontend.admission import Admission
from jaxinfer.engine.kv_cache.attention_window import AttentionWindow
from jaxinfer.engine.llm import LLM
from jaxinfer.model.cache import abstract_cache
from jaxinfer.plan.cache import MemoryQuestion
from tests.engine.engines import forget_prefixes
from tests.engine.probe import admission_of, runner_of, scheduler_of, set_admission
from tests.engine.sights import Endless

# Requests may be longer than 5 pages, of which they see the first and the last four.
ENDLESS = {"max_model_len": 80, "num_sink_tokens": 16}
SIGHT = Endless(num_sinks=16, num_seen=80, page_size=16)


@contextlib.contextmanager
def endless(llm: LLM) -> Iterator[LLM]:
    """Lets the requests of an engine be endless for a while: its steps are the same, and nothing else is compiled."""
    config, pool, copier = llm.engine_config, scheduler_of(llm).replicas[0].tables.pools[0], runner_of(llm)._copiers[0]
    kept = (admission_of(llm), pool.window, copier._turn)
    config = dataclasses.replace(config, **ENDLESS)
    window = plan_window(MemoryQuestion(model=llm.model_config, config=config, dtype="float32"))
    admission = dataclasses.replace(
        admission_of(llm), engine_config=config, max_model_len=config.max_model_len, window=window
    )
    _become(llm, admission, window, _turn_of(llm))
    try:
        yield llm
    finally:
        _become(llm, *kept)


@functools.cache
def _turn_of(llm: LLM) -> Any:
    cache = abstract_cache(llm.model_config, admission_of(llm).cache_config)
    return PageCopier(cache, llm.model_config, (1,), num_sinks=1)._turn


def _become(llm: LLM, admission: Admission, window: AttentionWindow | None, turn: Any) -> None:
    forget_prefixes(llm)  # a page holds something else where a token does not see all before it
    set_admission(llm, admission)
    pool = scheduler_of(llm).replicas[0].tables.pools[0]
    pool.window, pool.is_endless = window, window is not None and window.num_sinks > 0
    runner_of(llm)._copiers[0]._turn = turn
