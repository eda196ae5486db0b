"""Every page has one owner or none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.engine.pages import PageAllocator


def test_all_pages_are_free_at_first():
    assert PageAllocator(5).num_free == 5


def test_allocated_pages_are_distinct_and_inside_the_pool():
    pages = PageAllocator(5).allocate(5)

    assert sorted(pages) == [0, 1, 2, 3, 4]


def test_more_pages_than_are_free_are_refused_and_none_is_taken():
    allocator = PageAllocator(3)
    allocator.allocate(2)

    with pytest.raises(RuntimeError, match=r"2 pages asked for, 1 of 3 are free"):
        allocator.allocate(2)

    assert allocator.num_free == 1


def test_a_page_given_back_twice_is_refused():
    allocator = PageAllocator(3)
    pages = allocator.allocate(1)
    allocator.free(pages)

    with pytest.raises(RuntimeError, match=rf"page {pages[0]} was given back twice"):
        allocator.free(pages)


@given(num_pages=st.integers(1, 12), moves=st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=40))
def test_free_and_owned_pages_are_the_pool_after_every_move(num_pages, moves):
    allocator, owned = PageAllocator(num_pages), []

    for is_allocation, count in moves:
        if is_allocation:
            owned.append(allocator.allocate(min(count, allocator.num_free)))
        elif owned:
            allocator.free(owned.pop(count % len(owned)))
        pages = [page for share in owned for page in share]
        assert len(pages) == len(set(pages))
        assert set(pages) <= set(range(num_pages))
        assert allocator.num_free + len(pages) == num_pages
