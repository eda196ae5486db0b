"""Any body that the server's own OpenAPI document allows or forbids gets a documented answer, and never a fault."""

from __future__ import annotations

import collections
import os
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import checks

from tests.serve.servers import NAME

CHECKS: Any = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
NUM_REQUESTS = int(os.environ.get("JAXINFER_SERVER_REQUESTS", "2000"))
GENERATION = schemathesis.GenerationMode
pytestmark = pytest.mark.usefixtures("stays_idle")


@pytest.fixture(scope="module")
def operations(http):
    schema = schemathesis.openapi.from_dict(http.get("/openapi.json").json())
    results: list[Any] = list(schema.get_all_operations())
    return [result.ok() for result in results]


def test_every_body_gets_an_answer_as_documented(http, operations):
    statuses: collections.Counter[int] = collections.Counter()
    with_body = [operation for operation in operations if len(operation.body)]
    share = NUM_REQUESTS // (2 * len(with_body)) + 1
    for operation in with_body:
        for mode in (GENERATION.POSITIVE, GENERATION.NEGATIVE):
            statuses += call_all(operation, mode, share, http)
    for operation in operations:
        if operation not in with_body:
            statuses += call_all(operation, GENERATION.POSITIVE, 20, http)

    assert sum(statuses.values()) >= NUM_REQUESTS
    assert {200, 400} <= statuses.keys()


def call_all(operation: Any, mode: Any, count: int, http: httpx.Client) -> collections.Counter[int]:
    statuses: collections.Counter[int] = collections.Counter()

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    @given(operation.as_strategy(generation_mode=mode))
    def call(case: Any) -> None:
        if isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = NAME  # or every answer would be that there is no such model
        response = case.call(base_url=str(http.base_url), session=session)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    with requests.Session() as session:
        call()
    return statuses
