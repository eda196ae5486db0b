"""Draft trees: several drafts per position, of which the target accepts one path."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import overload

from jaxinfer.validation import MAX_INT, as_ints, shown


@dataclass(frozen=True)
class DraftTree(Sequence[int]):
    """Draft tokens, each with its parent, the draft that it follows.

    Parents come before their children, so any prefix is a tree as well: the engine verifies the prefix that pays.
    Among drafts with one parent, the first is the best guess. Raises ValueError if the two tuples are no tree.

    token_ids 6 9 7 8, parents -1 -1 0 0: 6 or 9 comes next, and after 6 comes 7 or 8
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]  # index of the parent; -1 if the draft follows the request's last token

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", as_ints("token_ids", self.token_ids))
        object.__setattr__(self, "parents", as_ints("parents", self.parents, -MAX_INT))
        wrong = [i for i, parent in enumerate(self.parents) if not -1 <= parent < i]
        if len(self.token_ids) != len(self.parents) or wrong:
            place = f"; parents[{wrong[0]}]={self.parents[wrong[0]]} is no draft before it" if wrong else ""
            given = f"token_ids={shown(self.token_ids)} and parents={shown(self.parents)}"
            raise ValueError(
                f"DraftTree of {given} is no tree{place}: give each token"
                " the place of the draft that it follows, which comes before it, or -1"
            )

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> DraftTree: ...
    def __getitem__(self, index: int | slice) -> int | DraftTree:
        """Returns a token, or the first drafts: `tree[:count]`."""
        if not isinstance(index, slice):
            return self.token_ids[index]
        if index.start or index.step:
            raise IndexError(f"{index} of a tree is none: take its first drafts, tree[:count]")
        return DraftTree(self.token_ids[index], self.parents[index])


Drafts = Sequence[int]  # a `DraftTree`, or a list of consecutive tokens


def parents_of(drafts: Drafts) -> Sequence[int]:
    """Returns the index of each draft's parent; -1 if the draft follows the request's last token."""
    return drafts.parents if isinstance(drafts, DraftTree) else range(-1, len(drafts) - 1)


def first_of(drafts: Drafts) -> Sequence[int]:
    """Returns the drafts for the next position, the best guess first."""
    if isinstance(drafts, DraftTree):
        return [token for token, parent in zip(drafts.token_ids, drafts.parents, strict=True) if parent == -1]
    return drafts[:1]


def rest_of(drafts: Drafts, token_id: int) -> Drafts:
    """Returns the drafts that remain if `token_id` is the next token: those that follow it; none if no draft has it."""
    if not isinstance(drafts, DraftTree):
        return drafts[1:] if drafts[:1] == [token_id] else []
    first = next(
        (i for i, (t, p) in enumerate(zip(drafts, drafts.parents, strict=True)) if (t, p) == (token_id, -1)), None
    )
    if first is None:
        return []
    found = {first}
    for i, parent in enumerate(drafts.parents):
        if parent in found:
            found.add(i)
    return some_of(drafts, found - {first})


def some_of(drafts: Drafts, places: Collection[int]) -> Drafts:
    """Returns the drafts at these indices. In a tree, a draft whose parent is left out becomes a root."""
    kept = sorted(places)
    token_ids = [drafts[place] for place in kept]
    if not isinstance(drafts, DraftTree):
        return token_ids
    index = {place: i for i, place in enumerate(kept)}
    return DraftTree(tuple(token_ids), tuple(index.get(drafts.parents[place], -1) for place in kept))
