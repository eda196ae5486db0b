"""While one client does its worst within the limits, neither /health nor another client's stream falls silent."""

from __future__ import annotations

import pytest

from scripts.measure.silence import ATTACKS, Silence, bundled_server

pytestmark = pytest.mark.quiet  # other work on the machine would be measured too

MAX_SILENCE = 0.3  # seconds, on a machine that has nothing else to do
MAX_GROWTH = 400.0  # MiB: what a few large bodies, answers and their pieces take while they are there


@pytest.fixture(scope="module")
def server():
    with bundled_server() as server:
        yield server


@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_is_silent_during(name, server):
    """Of two tries the better one counts, and a loaded machine is judged by its own silence in the same minute."""

    def excess() -> float:
        alone: Silence = server.silence_alone()
        found: Silence = server.silence_during(lambda: server.run(ATTACKS[name]))
        assert found.growth <= MAX_GROWTH
        pairs = ((found.health, alone.health), (found.stream, alone.stream))
        return max(silence / max(MAX_SILENCE, 3 * least) for silence, least in pairs)

    first = excess()
    assert first <= 1 or excess() <= 1
