"""The pages of a request, of each kind that its model has, and the contents that it may begin with.

Page i of every kind is for the same tokens. Some kinds keep all pages of a request, others a window or the last state.

tokens             |  page 0  |  page 1  |  page 2  |  page 3  | num_computed
all tokens         |    12    |     4    |    31    |     7    |
window of a page   |  freed   |  freed   |     2    |     9    |
state              |  freed   |  freed   |  freed   |     5    |   a full page may be shared
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

if TYPE_CHECKING:
    from jaxinfer.engine.request.request import Request


@dataclass(slots=True, eq=False)
class KindTable:
    """A request's pages of one kind, by index. An endless request also has rotated copies of its first pages."""

    pages: tuple[int, ...] = ()  # a new tuple on every change, so a step finds unchanged tables cheaply
    freed: range = range(0)  # indices of pages behind the window: their ids in `pages` are not its own
    rotated_sinks: tuple[int, ...] = ()  # copies of the sink pages, rotated by `num_evicted_tokens` positions
    num_evicted_tokens: int = 0  # tokens of an endless request that attention and `attended` leave out

    @property
    def attended(self) -> tuple[int, ...]:
        """The block table: the pages that the next tokens attend to, and are written to, in order."""
        return self.rotated_sinks + self.pages[self.freed.stop :] if self.num_evicted_tokens else self.pages

    @property
    def owned_pages(self) -> tuple[int, ...]:
        return self.pages[: self.freed.start] + self.pages[self.freed.stop :] + self.rotated_sinks

    @property
    def num_owned(self) -> int:
        return len(self.pages) - len(self.freed) + len(self.rotated_sinks)

    @property
    def by_index(self) -> dict[int, int]:
        """The owned pages by index, without rotated copies."""
        return {index: page for index, page in enumerate(self.pages) if index not in self.freed}

    def owns(self, index: int) -> bool:
        return index < len(self.pages) and index not in self.freed

    def put(self, index: int, page: int) -> None:
        """Replaces the page at `index`."""
        self.pages = (*self.pages[:index], page, *self.pages[index + 1 :])

    def move_to(self, pages: Sequence[int]) -> None:
        """Replaces the owned pages by these, in the order of `owned_pages`."""
        new = dict(zip(self.owned_pages, pages, strict=True))
        self.pages = tuple(new.get(page, 0) for page in self.pages)
        self.rotated_sinks = tuple(new[page] for page in self.rotated_sinks)

    def clear(self) -> None:
        self.pages, self.freed, self.rotated_sinks, self.num_evicted_tokens = (), range(0), (), 0


@dataclass(slots=True, eq=False)
class PageTable:
    """The tables of all kinds; only the first kind has one until the request runs."""

    kinds: tuple[KindTable, ...] = field(default_factory=lambda: (KindTable(),))
    saved: Sequence[Mapping[int, Any]] = ()  # page contents from a saved request's file, by kind and page index
    num_saved: int = 0  # tokens that `saved` covers
    num_swapped_tokens: int = 0  # `num_known` at the last preemption, when the last pages went to a tier
    _origin: ReferenceType[Request] | None = None

    @property
    def first(self) -> KindTable:
        return self.kinds[0]

    @property
    def pages(self) -> tuple[int, ...]:
        """The pages of the first kind; a request without them has none of other kinds."""
        return self.kinds[0].pages

    @property
    def owned_pages(self) -> list[tuple[int, ...]]:
        """The owned pages of each kind."""
        return [table.owned_pages for table in self.kinds]

    @property
    def origin(self) -> Request | None:
        """The request that it was forked from, whose pages it may copy; None once that one is gone."""
        return None if self._origin is None else self._origin()

    @origin.setter
    def origin(self, origin: Request | None) -> None:
        self._origin = None if origin is None else ref(origin)  # else a branch would keep all of its ancestors

    def begin_like(self, origin: Request) -> None:
        """Lets a branch begin with the pages of its origin, or with the file that the origin has not read yet."""
        self.origin, self.saved, self.num_saved = origin, origin.table.saved, origin.table.num_saved

    def forget_sources(self) -> None:
        """Drops the reference to the origin and the contents of the file."""
        self.origin, self.saved, self.num_saved = None, (), 0
