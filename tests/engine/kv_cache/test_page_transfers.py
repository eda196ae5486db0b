"""Copies are made in order, together where their order does not matter, and each once unless interrupted."""

from __future__ import annotations

import itertools

from jaxinfer.engine.kv_cache.page_transfers import CopyPage, PageTransfers, RotatePages, SwapIn, SwapOut


def queue_of(*copies) -> PageTransfers:
    queue = PageTransfers()
    for copy in copies:
        queue.append(copy)
    return queue


def outs(*pages):
    return [SwapOut(page, b"") for page in pages]


def ins(*pages):
    return [SwapIn(page, "") for page in pages]


def test_copies_of_one_kind_are_made_together_up_to_the_limit():
    queue = queue_of(*outs(1, 2, 3), *ins(4, 5), *outs(6))

    assert list(queue.batches(2)) == [outs(1, 2), outs(3), ins(4, 5), outs(6)]


def test_copies_onto_one_page_are_made_one_after_the_other():
    queue = queue_of(*ins(1, 2, 1))

    assert list(queue.batches(8)) == [ins(1, 2), ins(1)]


def test_copies_within_the_pool_are_made_one_by_one():
    copies = [CopyPage(1, 2), CopyPage(2, 3), RotatePages((3,), (4,), 16), RotatePages((3,), (5,), 16), *outs(1)]

    assert list(queue_of(*copies).batches(8)) == [[copy] for copy in copies]


def test_what_was_interrupted_is_made_again_and_what_was_made_is_not():
    queue = queue_of(*outs(1), *ins(2), *outs(3))

    assert list(itertools.islice(queue.batches(8), 2)) == [outs(1), ins(2)]

    assert list(queue.batches(8)) == [ins(2), outs(3)]
    assert len(queue.queue) == 0
