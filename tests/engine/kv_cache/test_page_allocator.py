"""Every page is free, cached or owned, and what is cached is found until it is evicted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.engine.kv_cache.page_allocator import PageAllocator

A, B, C = b"a", b"b", b"c"


def filled(num_pages: int, *keys: bytes) -> tuple[PageAllocator, list[int]]:
    """An allocator with one owner of one full page per key."""
    allocator = PageAllocator(num_pages)
    pages = allocator.allocate(len(keys))
    for page, key in zip(pages, keys, strict=True):
        allocator.register(page, key)
    return allocator, pages


def test_all_pages_are_free_at_first():
    assert PageAllocator(5).num_free == 5


def test_allocated_pages_are_distinct_and_inside_the_pool():
    pages = PageAllocator(5).allocate(5)

    assert sorted(pages) == [0, 1, 2, 3, 4]


def test_more_pages_than_are_available_are_refused_and_none_is_taken():
    allocator, pages = filled(3, A, B)
    allocator.release(pages[:1])

    with pytest.raises(RuntimeError, match=r"3 pages asked for, 2 of 3 are available"):
        allocator.allocate(3)

    assert (allocator.num_free, allocator.num_cached) == (1, 1)


def test_a_page_given_back_twice_is_refused():
    allocator = PageAllocator(3)
    pages = allocator.allocate(1)
    allocator.release(pages)

    with pytest.raises(RuntimeError, match=rf"page {pages[0]} was given back twice"):
        allocator.release(pages)


def test_a_page_is_given_back_by_its_last_user():
    allocator = PageAllocator(1)
    pages = allocator.allocate(1)
    allocator.acquire(pages[0])

    allocator.release(pages)
    assert allocator.num_available == 0

    allocator.release(pages)
    assert allocator.num_available == 1


def test_a_page_with_a_key_is_found_after_its_last_user_is_gone():
    allocator, pages = filled(3, A)

    allocator.release(pages)

    assert (allocator.num_cached, allocator.find(A), allocator.find(B)) == (1, pages[0], None)


def test_a_page_that_is_found_and_used_is_not_evicted():
    allocator, pages = filled(2, A, B)
    allocator.release(pages)
    allocator.acquire(pages[0])

    assert allocator.allocate(1) == [pages[1]]
    assert (allocator.find(A), allocator.find(B)) == (pages[0], None)


def test_a_free_page_can_not_be_acquired():
    with pytest.raises(KeyError):
        PageAllocator(2).acquire(1)


def test_free_pages_are_given_before_cached_ones():
    allocator, pages = filled(3, A)
    allocator.release(pages)

    allocator.allocate(2)

    assert allocator.find(A) == pages[0]


def test_the_least_recently_used_page_is_evicted_first():
    allocator, pages = filled(3, A, B, C)
    for page in pages:
        allocator.release([page])
    allocator.acquire(pages[0])  # A is used again
    allocator.release([pages[0]])

    allocator.allocate(1)
    assert [allocator.find(key) is not None for key in (A, B, C)] == [True, False, True]
    allocator.allocate(1)
    assert [allocator.find(key) is not None for key in (A, B, C)] == [True, False, False]


def test_the_end_of_a_prefix_is_evicted_before_its_beginning():
    allocator, pages = filled(3, A, B, C)
    allocator.release(pages)

    allocator.allocate(2)

    assert [allocator.find(key) is not None for key in (A, B, C)] == [True, False, False]


def test_content_that_is_known_already_is_kept_once():
    allocator, pages = filled(3, A)
    other = allocator.allocate(1)[0]

    kept = allocator.register(other, A)

    assert (kept, allocator.num_users(pages[0]), allocator.num_users(other)) == (pages[0], 2, 0)


def test_no_more_is_evicted_than_there_is():
    allocator, pages = filled(3, A, B)
    allocator.release(pages[:1])

    assert (allocator.evict(5), allocator.evict(-1), allocator.num_free) == (1, 0, 2)


@given(num_pages=st.integers(1, 12), moves=st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=40))
def test_free_and_owned_pages_are_the_pool_after_every_move(num_pages, moves):
    allocator, owned = PageAllocator(num_pages), []

    for is_allocation, count in moves:
        if is_allocation:
            owned.append(allocator.allocate(min(count, allocator.num_free)))
        elif owned:
            allocator.release(owned.pop(count % len(owned)))
        pages = [page for share in owned for page in share]
        assert len(pages) == len(set(pages))
        assert set(pages) <= set(range(num_pages))
        assert allocator.num_free + len(pages) == num_pages
