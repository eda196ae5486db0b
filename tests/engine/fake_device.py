"""A device of the scheduler's tests: no arrays, but a cache whose slots are written and read as on a real one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxinfer.config import SamplingParams
from jaxinfer.engine.kv_cache.page_transfers import Copy, CopyPage, RotatePages, SwapIn, SwapOut
from jaxinfer.engine.kv_cache.tiers import PageTiers
from jaxinfer.engine.request.page_keys import PageKeys, root_key
from jaxinfer.engine.request.request import Request
from jaxinfer.engine.scheduling.scheduler import Scheduler
from jaxinfer.engine.scheduling.step import Chunk, Step
from tests.engine.sights import Sight, seen, window_of


def make_request(
    request_id: int,
    prompt: int | list[int],
    max_tokens: int,
    *,
    page_size: int = 16,
    cache_salt: str | None = None,
    reads_context: bool = False,
    log_probs: int = 0,
    **terms: Any,
) -> Request:
    """A request with this prompt, or with one of this length that no other shares. Without a salt it shares nothing."""
    root = None if cache_salt is None else root_key(model="", params_version="", adapter="", cache_salt=cache_salt)
    return Request(
        request_id,
        [next_token([request_id, i]) for i in range(prompt)] if isinstance(prompt, int) else prompt,
        SamplingParams(max_tokens=max_tokens, log_probs=log_probs, repetition_penalty=2.0 if reads_context else 1.0),
        seed=0,
        max_tokens=max_tokens,
        stop_token_ids=(),
        detokenizer=None,
        keys=None if root is None else PageKeys(root, page_size),
        cache_salt=cache_salt,
        **terms,
    )


def next_token(seen: list[int], position: int = 0, seed: int = 0, sample_index: int = 0) -> int:
    """A model of sorts: a function of the tokens that it sees, their order, the place of the next and what draws it."""
    return hash((seed, sample_index, position, *seen)) % 1_000_003


def token_after(tokens: list[int], request: Request, windowed: Sight) -> int:
    """What a request draws after these tokens."""
    visible = [tokens[i] for i in seen(request, len(tokens), windowed)]
    return next_token(visible, len(tokens), request.seed, request.sample_index)


def expected_tokens(request: Request, count: int, begun: list[int] | None = None, window: Sight = None) -> list[int]:
    """What a request draws that had the tokens `begun` when it was made or set back, its prompt if None."""
    tokens = begun or request.token_ids[: request.num_prompt_tokens]
    while len(tokens) < request.num_prompt_tokens + count:
        tokens = [*tokens, token_after(tokens, request, window)]
    return tokens[request.num_prompt_tokens :]


class GuessingDrafter:
    """Knows what comes next, and guesses wrong now and then, on purpose."""

    def __init__(self, seed: int, window: Sight = None) -> None:
        self._random = random.Random(seed)
        self._window = window
        self.forgotten: list[int] = []

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        return [self._draft(*pair) for pair in zip(requests, counts, strict=True)]

    def forget(self, request: Request) -> None:
        self.forgotten.append(request.request_id)

    def _draft(self, request: Request, count: int) -> list[int]:
        tokens = list(request.token_ids)
        for _ in range(self._random.randint(0, count + 1)):
            tokens.append(token_after(tokens, request, self._window) if self._random.random() < 0.7 else 5)
        return tokens[len(request.token_ids) :]


def output_of(tokens: np.ndarray, counts: np.ndarray) -> SimpleNamespace:
    """What a step hands to the scheduler, without log-probabilities and states."""
    fields = {"log_probs": np.zeros(tokens.shape), "sampling_log_probs": None, "hidden": None}
    return SimpleNamespace(tokens=tokens, num_emitted=counts, **fields)


OPEN = -1  # in the place of a window: a token sees the tokens of its own page


class FakeDevice:
    """Keeps tokens in slots as a cache would and reads each context back through the request's pages.

    With a `window` a token sees that many, itself included, unless the request's parameters read all; an endless
    request sees its first tokens in pages that are turned as far as they have to be.
    """

    def __init__(
        self, page_size: int, tiers: PageTiers | None = None, window: Sight = None, further: Sequence[int] = ()
    ):
        # Tokens in the window of each further kind of pages; 0 for states, OPEN for open pages.
        self.further = further
        # By kind and page: the tokens by offset in the page, or all tokens that a state has seen.
        self.bounded: list[dict[int, Any]] = [{} for _ in further]
        self.page_size = page_size
        self.tiers = tiers
        self.window = window
        self.slots: dict[int, int] = {}
        self.turns: dict[int, int] = {}  # of pages with turned tokens, by how much
        # By request: the position of the first token that the last step has drawn, and all that it has drawn.
        self.drawn: dict[int, tuple[int, list[int]]] = {}

    def run(self, step: Step) -> SimpleNamespace:
        for batch in step.copies.batches(2):
            self.copy(batch)
        rows, counts = [], []
        if step.is_loop:
            return self.loop(step)
        for chunk in step.chunks:
            drawn = self.compute(chunk) if chunk.request.finish_reason is None else [-1]
            is_right = [draft == token for draft, token in zip(chunk.drafts, drawn, strict=False)]
            rows.append(drawn)
            counts.append([*is_right, False].index(False) + 1)
            self.advance_further(chunk, chunk.drafts[: counts[-1] - 1])
        self.keep_drawn(step, [row[:1] for row in rows])
        width = max(map(len, rows))
        tokens = np.array([row + [-1] * (width - len(row)) for row in rows])
        tokens = tokens if step.is_verify else tokens[:, 0]
        return output_of(tokens, np.array(counts))

    def loop(self, step: Step) -> SimpleNamespace:
        """Draws token after token for every chunk, each of which it writes before the next."""
        most = max(chunk.max_new_tokens for chunk in step.chunks)
        tokens = np.full((len(step.chunks), most), -1)
        counts = np.array([chunk.max_new_tokens for chunk in step.chunks])
        rows = []
        for row, chunk in zip(tokens, step.chunks, strict=True):
            ahead: list[int] = []
            for i in range(chunk.max_new_tokens if chunk.request.finish_reason is None else 0):
                row[i] = self.compute(replace(chunk, drafts=ahead))[-1]
                ahead.append(int(row[i]))
            self.advance_further(chunk, ahead[:-1])
            rows.append(ahead)
        self.keep_drawn(step, rows)
        return output_of(tokens, counts)

    def keep_drawn(self, step: Step, rows: Sequence[list[int]]) -> None:
        self.drawn = {
            chunk.request.request_id: (chunk.start + chunk.num_tokens, row)
            for chunk, row in zip(step.chunks, rows, strict=True)
        }

    def tokens_of(self, request: Request, start: int, end: int) -> list[int]:
        """The tokens of a request, those included that the last step has drawn and the host does not know."""
        first, drawn = self.drawn.get(request.request_id, (0, []))
        known = len(request.token_ids)
        unknown = drawn[known - first :] if first <= known else []
        return [*request.token_ids, *unknown][start:end]

    def compute(self, chunk: Chunk) -> list[int]:
        """Writes the chunk's tokens and drafts; returns the token after the last known one and after each draft."""
        end = chunk.start + chunk.num_tokens
        if not chunk.is_stale:
            self.check_context(chunk.request, chunk.start)
        tokens = self.tokens_of(chunk.request, chunk.start, end)
        num_unknown = end - max(chunk.start, len(chunk.request.token_ids))
        assert num_unknown <= 1 or chunk.is_stale, "a step takes one unknown token of a request"
        for position, token in enumerate([*tokens, *chunk.drafts], chunk.start):
            self.slots[self.slot_in_table(chunk.request, position)] = token
        return [self.draw(chunk.request, end + i) for i in range(1 + len(chunk.drafts))]

    def advance_further(self, chunk: Chunk, accepted: Sequence[int]) -> None:
        """Writes the chunk's tokens and those of its drafts that count to the pages of the further kinds."""
        request, S = chunk.request, self.page_size
        if chunk.request.finish_reason is not None or chunk.is_stale:
            return
        tokens = [*self.tokens_of(request, chunk.start, chunk.start + chunk.num_tokens), *accepted]
        self.check_further(request, chunk.start)
        for kind, window in enumerate(self.further):
            pages = self.bounded[kind]
            seen_before = self.tokens_of(request, 0, chunk.start)
            for position, token in enumerate(tokens, chunk.start):
                page = self.bounded_page(request, kind, position // S)
                seen_before = [*seen_before, token]
                if window:
                    pages[page] = {**pages.get(page, {}), position % S: token}
                elif position + 1 == chunk.start + len(tokens) or (position + 1) % S == 0:
                    pages[page] = seen_before

    def check_further(self, request: Request, num_tokens: int, num_ahead: int = 0) -> None:
        """Asserts that the next token finds what it needs of the first tokens in the pages of the further kinds.

        A state may have seen `num_ahead` tokens more, those of a launched step.
        """
        S = self.page_size
        for kind, window in enumerate(self.further):
            first = num_tokens // S * S if window == OPEN else max(num_tokens + 1 - window, 0)
            for position in range(first, num_tokens) if window else ():
                page = self.bounded[kind][self.bounded_page(request, kind, position // S)]
                assert [page[position % S]] == self.tokens_of(request, position, position + 1), "a window of another"
            if window == 0 and num_tokens:
                page = self.bounded[kind][self.bounded_page(request, kind, (num_tokens + num_ahead - 1) // S)]
                assert len(page) == num_tokens + num_ahead, "a state of another length"
                assert page[:num_tokens] == self.tokens_of(request, 0, num_tokens), "the state of another"

    def bounded_page(self, request: Request, kind: int, index: int) -> int:
        table = request.table.kinds[1 + kind]
        assert table.owns(index), "a page is used that was given back, or never given"
        return table.pages[index]

    def copy(self, batch: list[Copy]) -> None:
        """Makes copies, each content being what is in the slots of a page; the last first, for any order must do."""
        for copy in reversed(batch):
            if not isinstance(copy, RotatePages) and copy.kind:
                self.copy_bounded(copy, self.bounded[copy.kind - 1])
                continue
            match copy:
                case SwapOut(page, key):
                    assert self.tiers is not None
                    self.tiers.put(key, self.content(page))
                case SwapIn(page, content):
                    self.fill(page, content)
                case CopyPage(source, page):
                    self.fill(page, self.content(source))
                case RotatePages(sources, pages, num_positions):
                    for source, page in zip(sources, pages, strict=True):
                        self.fill(page, self.content(source))
                        self.turns[page] = num_positions

    def copy_bounded(self, copy: SwapOut | SwapIn | CopyPage, pages: dict[int, Any]) -> None:
        match copy:
            case SwapOut(page, key):
                assert self.tiers is not None
                self.tiers.put(key, pages[page])
            case SwapIn(page, content):
                pages[page] = content
            case CopyPage(source, page):
                pages[page] = pages[source]

    def content(self, page: int) -> dict[int, int]:
        start = page * self.page_size
        return {i: self.slots[start + i] for i in range(self.page_size) if start + i in self.slots}

    def fill(self, page: int, content: dict[int, int]) -> None:
        for i in range(self.page_size):
            self.slots.pop(page * self.page_size + i, None)
        self.slots |= {page * self.page_size + i: token for i, token in content.items()}

    def draw(self, request: Request, kv_len: int) -> int:
        return next_token(self.context(request, kv_len), kv_len, request.seed, request.sample_index)

    def context(self, request: Request, kv_len: int) -> list[int]:
        """What a request sees that has so many tokens in its pages."""
        positions = seen(request, kv_len, self.window)
        table = request.table.first
        if not table.num_evicted_tokens:
            return [self.slots[self.slot(request, i)] for i in positions]
        assert {self.turns[page] for page in table.rotated_sinks} == {table.num_evicted_tokens}, (
            "sinks are not where they should be"
        )
        assert len(positions) == kv_len - table.num_evicted_tokens, "a token sees what is not for it"
        return [self.slots[self.slot_in_table(request, table.num_evicted_tokens + i)] for i in range(len(positions))]

    def check_context(self, request: Request, kv_len: int) -> None:
        """Asserts that what the token after the first `kv_len` sees of them is in its pages."""
        positions = seen(request, kv_len + 1, self.window)[:-1]
        context = [self.slots[self.slot(request, i)] for i in positions]
        tokens = self.tokens_of(request, 0, kv_len)
        assert context == [tokens[i] for i in positions], "the tokens of another"

    def slot(self, request: Request, position: int) -> int:
        """Where a request has a token."""
        table = request.table.first
        assert table.owns(position // self.page_size), "a page is used that was given back"
        return table.pages[position // self.page_size] * self.page_size + position % self.page_size

    def slot_in_table(self, request: Request, position: int) -> int:
        """Where steps find a token, and write it."""
        table = request.table.first
        index, offset = divmod(position - table.num_evicted_tokens, self.page_size)
        assert table.num_evicted_tokens or index not in table.freed, "a page is used that was given back"
        return table.attended[index] * self.page_size + offset


class Engine:
    """A scheduler with a clock that is set by hand and a step that takes one second."""

    def __init__(self, *, window: Sight = None, **limits: Any):
        self.now = 0.0
        limits = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "num_pages": 16, "page_size": 16, **limits}
        self.window = window_of(window, 16, limits["max_num_batched_tokens"])
        self.scheduler = Scheduler(**limits, window=self.window, clock=lambda: self.now)
        self.device = FakeDevice(16, limits.get("tiers"), window)
        self.finished: list[int] = []
        self.completions = {}

    def add(self, request_id: int, *, prompt: Any = 4, max_tokens: int = 1, **terms: Any):
        request = make_request(request_id, prompt, max_tokens, **terms)
        self.scheduler.add(request)
        return request

    def step(self) -> list[tuple[int, int]]:
        """Returns (request, number of tokens) of the chunks."""
        self.enter(self.scheduler.expire())
        step = self.scheduler.schedule()
        if step is None:
            return []
        self.now += 1.0
        self.enter(self.scheduler.commit(step, self.device.run(step)))
        return [(chunk.request.request_id, chunk.num_tokens) for chunk in step.chunks]

    def enter(self, deltas):
        done = [delta.completion for delta in deltas if delta.completion is not None]
        self.finished += [completion.request_id for completion in done]
        self.completions |= {completion.request_id: completion for completion in done}

    def run(self) -> list[int]:
        """Steps to the end; returns the requests as they finished."""
        while self.scheduler.num_unfinished:
            self.step()
        return self.finished
