"""The queue of waiting requests gives up any of them and stays in order."""

from __future__ import annotations

from random import Random

import pytest

from jaxinfer.engine.scheduling.waiting import RequestHeap
from tests.engine.fake_device import make_request


@pytest.mark.parametrize("seed", range(5))
def test_requests_leave_a_heap_in_order_whichever_are_removed(seed):
    random, heap, waiting = Random(seed), RequestHeap(), []
    for order in range(300):
        request = make_request(order, 1, 1)
        request.order, number = order, float(random.randrange(5))
        heap.push(number, request)
        waiting.append((number, order, request))
        for _ in range(random.choice([0, 0, 1, 2])):
            if waiting:
                gone = min(waiting) if random.random() < 0.3 else random.choice(waiting)
                waiting.remove(gone)
                heap.remove(gone[2])
                heap.remove(gone[2])
        assert heap.first is (min(waiting)[2] if waiting else None)
        assert len(heap._entries) <= 2 * len(waiting)
