"""What the tiers hold, what they pass on, and when a copy pays."""

from __future__ import annotations

import pytest

from jaxinfer.engine.kv_cache.tiers import HostTier, PageTiers

A, B, C, D = b"a", b"b", b"c", b"d"


def make_tiers(*max_pages: int) -> tuple[PageTiers, list[HostTier]]:
    tiers = [HostTier(10 * n + 9, size_of=lambda _: 10) for n in max_pages]
    return PageTiers(tiers), tiers


def keys_of(tier: HostTier) -> set[bytes]:
    return {key for key in (A, B, C, D) if tier.get(key) is not None}


def test_what_was_put_in_is_found_and_nothing_else():
    tiers, _ = make_tiers(2)
    tiers.put(A, "content of a")

    assert (tiers.get(A, 1), tiers.get(B, 1)) == ("content of a", None)


def test_no_more_pages_are_held_than_fit_the_bytes():
    tiers, (host,) = make_tiers(2)
    for key in (A, B, C):
        tiers.put(key, key)

    assert keys_of(host) == {B, C}
    assert (host.metrics().num_bytes, host.metrics().num_dropped) == (20, 1)


@pytest.mark.parametrize("use", [lambda tiers: tiers.get(A, 1), lambda tiers: tiers.wants(A, 1)], ids=["get", "wants"])
def test_the_least_recently_used_page_goes_first(use):
    tiers, (host,) = make_tiers(2)
    tiers.put(A, "a")
    tiers.put(B, "b")
    use(tiers)
    tiers.put(C, "c")

    assert keys_of(host) == {A, C}


def test_what_one_tier_drops_the_next_takes():
    tiers, (host, disk) = make_tiers(1, 2)
    for key in (A, B, C, D):
        tiers.put(key, key)

    assert (keys_of(host), keys_of(disk)) == ({D}, {B, C})


def test_a_page_that_is_found_below_comes_nearer():
    tiers, (host, disk) = make_tiers(1, 2)
    tiers.put(A, "a")
    tiers.put(B, "b")

    assert tiers.get(A, 1) == "a"
    assert keys_of(host) == {A}
    assert keys_of(disk) == {A, B}


def test_what_is_held_already_is_not_wanted():
    tiers, _ = make_tiers(1, 2)
    tiers.put(A, "a")
    tiers.put(B, "b")

    assert [tiers.wants(key, 1) for key in (A, B, C)] == [False, False, True]


@pytest.mark.parametrize(("num_tokens", "pays"), [(9, False), (10, True), (11, True)])
def test_a_copy_pays_where_computing_the_tokens_takes_as_long(num_tokens, pays):
    tiers, _ = make_tiers(2)
    tiers.put(A, "a")
    tiers.seconds_per_copy = 5.0
    tiers.observe_prefill(num_tokens=4, seconds=2.0)  # half a second each, and no better
    tiers.observe_prefill(num_tokens=1, seconds=60.0)

    assert tiers.wants(B, num_tokens) == pays
    assert (tiers.get(A, num_tokens) == "a") == pays


def test_before_anything_was_computed_every_copy_pays():
    tiers, _ = make_tiers(2)
    tiers.seconds_per_copy = 1000.0

    assert tiers.wants(A, 1)


def test_the_metrics_are_what_was_done():
    tiers, _ = make_tiers(1, 1)
    for key in (A, B, C):
        tiers.put(key, key)
    tiers.get(B, 1)

    host, disk = tiers.metrics()
    # A and B went down, B came up again for C, and A was dropped.
    assert (host.num_pages, host.num_stored, host.num_hits, host.num_dropped) == (1, 4, 0, 3)
    assert (disk.num_pages, disk.num_stored, disk.num_hits, disk.num_dropped) == (1, 3, 1, 2)
