"""The private parts of an engine that tests look at or change. No other file of the tests reaches into `LLM`."""

from __future__ import annotations

from typing import Any

from jaxinfer.engine.engine import Engine
from jaxinfer.engine.execution.warm_up import WarmUp
from jaxinfer.engine.frontend.admission import Admission
from jaxinfer.engine.frontend.outputs import DeltaBuffer, OutputRoutes
from jaxinfer.engine.llm import LLM


def engine_of(llm: LLM) -> Engine:
    return llm._engine


def scheduler_of(llm: LLM) -> Any:
    return llm._engine._scheduler


def runner_of(llm: LLM) -> Any:
    return llm._engine._runners[0]


def admission_of(llm: LLM) -> Admission:
    return llm._engine._admission


def set_admission(llm: LLM, admission: Admission) -> None:
    llm._engine._admission = branches_of(llm)._admission = admission
    vars(branches_of(llm)).pop("_identity", None)


def warm_up_of(llm: LLM) -> WarmUp:
    return llm._engine._warm_ups[0]


def branches_of(llm: LLM) -> Any:
    return llm._engine._branches


def buffer_of(llm: LLM) -> DeltaBuffer:
    """The deltas that the next `step` returns."""
    return llm._outputs


def is_idle(llm: LLM) -> bool:
    """True if no delta is kept and no sink waits for one."""
    return not buffer_of(llm) and not llm._engine.sinks


def clear_outputs(llm: LLM) -> None:
    """Drops all deltas and sinks."""
    buffer_of(llm).take()
    llm._engine._routes = OutputRoutes()
