"""Sizes of heads, groups of query heads and pages for which bits are judged: all of them, and a few of all kinds."""

from __future__ import annotations

import itertools

HEAD_DIMS = (16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256, 512)
GROUPS = (1, 2, 3, 4, 5, 7, 8, 16)
PAGE_SIZES = (16, 32, 64, 128)

ALL_HEADS_AND_PAGES = list(itertools.product(HEAD_DIMS, GROUPS, PAGE_SIZES))
# Each head size once, with all groups, and each page size with several of both.
SOME_HEADS_AND_PAGES = [
    (head_dim, GROUPS[i * 5 % len(GROUPS)], PAGE_SIZES[(i + i // 4) % len(PAGE_SIZES)])
    for i, head_dim in enumerate(HEAD_DIMS)
]
