"""Outputs of a given structure: which tokens may come next, worked out on the host by `llguidance`; free of jax."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from copy import copy
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from jaxinfer.sampling_params import AnswerParams, SamplingParams
from jaxinfer.text.json_schema import byte_tokenizer
from jaxinfer.text.schema_check import schema_checker
from jaxinfer.text.structure_trial import Trials, for_bytes, require_packages
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.text.unique_keys import KeyTokens, OpenKeys
from jaxinfer.validation import shown

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CHARACTERS = 2**18  # of a structure
MAX_MESSAGE = 1_000
NAMED_TOKEN = re.compile(r"<[^<>\s]+>")  # in a grammar: by its text, as in <|im_end|>, or its id
NUM_KNOWN = 64

NO_KEY_LEFT = (
    "every key that json_schema allows at this place of the object is there already; give its keys under properties, or"
    " allow others"
)


@dataclass(frozen=True)
class Structure:
    """A structure that is compiled: any number of requests may begin it, on any thread."""

    matcher: LLMatcher  # at its beginning; only copies of it go on
    check: Callable[[str], str | None] | None = None  # from a text that is complete to what is wrong with it
    key_tokens: KeyTokens | None = None  # of a JSON document in which `llguidance` may repeat a key
    can_run_out_of_keys: bool = False  # and may begin a key that is there already and can only end


class Grammar:
    """The state of one request in its structure.

    `early` i32[ceil(V / 32)] has a bit for each token; those whose bit is 0 may come only where no other may. `ends`
    are the end tokens, each with its text in the output.
    """

    def __init__(self, structure: Structure, early: np.ndarray, ends: Mapping[int, str]) -> None:
        self._structure = structure
        self._early = early
        self._ends = ends
        self._end = ""  # the text of the last token if that is an end token
        self._matcher = structure.matcher.deep_copy()
        self._keys = None if structure.key_tokens is None else OpenKeys()

    def begin_again(self) -> Grammar:
        """Returns the beginning of the same structure; nothing is compiled."""
        return Grammar(self._structure, self._early, self._ends)

    @property
    def is_complete(self) -> bool:
        """True if nothing can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def may_end(self) -> bool:
        """True if the structure is complete here, whether or not more can follow."""
        return self._matcher.is_accepting() and not self._matcher.is_error()

    @property
    def error(self) -> str | None:
        """The cause if nothing may follow although the structure is not complete, else None."""
        if self._matcher.is_error():
            reason, _, _ = self._matcher.get_error().partition("\n")  # below that it lists its state
            return f"llguidance could not follow the structure further: {_cut(reason)}"
        return None if self._keys is None or self.mask().any() else NO_KEY_LEFT

    @property
    def has_check(self) -> bool:
        """True if a complete text may have a `fault`."""
        return self._structure.check is not None

    def fault(self, text: str) -> str | None:
        """Returns what is wrong with a text that is complete, None if nothing is. Any thread may ask once it is."""
        return None if self._structure.check is None else self._structure.check(text.removesuffix(self._end))

    def accept(self, token_id: int) -> None:
        """Goes on by a token that the mask allowed."""
        self._matcher.consume_token(token_id)
        self._end = self._ends.get(token_id, "")
        self._keys = self._keys_after(token_id)

    def mask(self) -> np.ndarray:
        """Returns the tokens that may come next, one bit each, i32[ceil(V / 32)]; none after `llguidance` gave up."""
        return early_ones(self.possible(), self._early)

    def possible(self) -> np.ndarray:
        """Returns the tokens that may come next, with those that are not `early`."""
        words = np.zeros_like(self._early)
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():  # a limit was met, before or just now
            words[:] = 0
        if self._structure.key_tokens is not None and self._keys is not None:
            self._rule_out_keys(words.view(np.uint32), self._structure.key_tokens, self._keys)
        return words

    def _rule_out_keys(self, mask: np.ndarray, tokens: KeyTokens, keys: OpenKeys) -> None:
        """Clears the bits of tokens that give an object a key again, or lead to where nothing else can follow."""
        for token_id in tokens.repeating(keys, mask):
            _clear(mask, token_id)
        if self._structure.can_run_out_of_keys:
            for token_id in tokens.spelling(keys, mask):
                if not self.after(token_id).mask().any():
                    _clear(mask, token_id)

    def after(self, token_id: int) -> Self:
        """Returns a copy that has gone on by a token that the mask allowed, if anything can follow."""
        ahead = copy(self)
        ahead._matcher = self._matcher.deep_copy()
        if not self._matcher.is_stopped():
            ahead.accept(token_id)
        return ahead

    def allowed(self, token_ids: Sequence[int], parents: Sequence[int]) -> list[int]:
        """Returns the places of the tokens that the structure has room for.

        `parents`: the place of the token that each follows, -1 for those so far.
        """
        return allowed_places(self, token_ids, parents)

    def allows(self, token_id: int) -> bool:
        """True if a token may come next."""
        can_follow = not self._matcher.is_error() and self._matcher.validate_tokens([token_id]) == 1
        return can_follow and (self._keys is None or self._keys_after(token_id) is not None)

    def _keys_after(self, token_id: int) -> OpenKeys | None:
        tokens = self._structure.key_tokens
        return None if tokens is None or self._keys is None else tokens.after(self._keys, token_id)

    def masks(self, token_ids: Sequence[int], parents: Sequence[int]) -> list[np.ndarray]:
        """Returns the mask as it is, and as it would be after each of some tokens that are allowed; as in `allowed`."""
        return masks_after(self, token_ids, parents)


class Branching(Protocol):
    """A state of which a copy can go on by a token."""

    def allows(self, token_id: int) -> bool: ...

    def after(self, token_id: int) -> Self: ...

    def mask(self) -> np.ndarray: ...


def allowed_places(state: Branching, token_ids: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Returns the places of the tokens that a state has room for; `parents` as in `Grammar.allowed`."""
    states: list[Branching | None] = [state]
    for token_id, parent in zip(token_ids, parents, strict=True):
        before = states[1 + parent]
        states.append(None if before is None or not before.allows(token_id) else before.after(token_id))
    return [place for place, after in enumerate(states[1:]) if after is not None]


def masks_after(state: Branching, token_ids: Sequence[int], parents: Sequence[int]) -> list[np.ndarray]:
    """Returns the mask of a state, and its mask after each of some tokens that it allows."""
    # Copies, for there may be no way back from the end of the structure, or from a limit that is met.
    states: list[Branching] = [state]
    for token_id, parent in zip(token_ids, parents, strict=True):
        states.append(states[1 + parent].after(token_id))
    return [after.mask() for after in states]


def early_ones(words: np.ndarray, early: np.ndarray) -> np.ndarray:
    """Returns the tokens of a mask that are `early`, or all of them if none is."""
    others = words & early
    return others if others.any() else words


class GrammarCompiler:
    """Makes the grammars of requests for one tokenizer, on any thread; `vocab_size` is that of the model's logits."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._trials = Trials()
        # Compiled lately, or just now by another thread: all samples of a prompt have the same, and many prompts have.
        self._known: OrderedDict[tuple[str, Any, bool], Future[Structure]] = OrderedDict()
        self._known_lock, self._tokens_lock = Lock(), Lock()
        self._llg_tokenizer: LLTokenizer | None = None
        self._key_tokens: KeyTokens | None = None

    def compile(self, sampling: SamplingParams) -> Grammar | None:
        """Returns the structure that the output must have, None where any will do.

        Raises ValueError, with the reason, for one that cannot be compiled, or where what that takes is missing. A
        structure that several threads want at once is compiled once.
        """
        return None if sampling.structure is None else self.begin(sampling, *sampling.structure)

    def begin(self, sampling: SamplingParams, kind: str, value: Any) -> Grammar:
        """Returns one structure of an output that is sampled by some parameters; raises as `compile` does."""
        # Where only one text can follow, `llguidance` allows only the tokens that its tokenizer would make of it.
        # Parameters may rule these out; then any that spell the text are allowed.
        is_free = bool(sampling.allowed_token_ids or sampling.bad_words or sampling.logits_processors)
        structure = self._known_or_compiled(kind, value, is_free or sampling.no_repeat_ngram_size > 0)
        ends = self.ends(sampling)
        return Grammar(structure, ~self.bits(ends if sampling.ignore_eos else ()), ends)

    def bits(self, token_ids: Iterable[int]) -> np.ndarray:
        """Returns the mask of some tokens, i32[ceil(V / 32)]."""
        mask = np.zeros(-(-self._vocab_size // 32) * 32, np.bool_)
        mask[list(token_ids)] = True
        return np.packbits(mask, bitorder="little").view(np.int32)

    def ends(self, sampling: SamplingParams) -> dict[int, str]:
        """Returns the end tokens, each with its text in the output."""
        end_ids = self._eos_token_ids or [self._tokens().eos_token]
        return {token_id: self.text(sampling, [token_id]) for token_id in end_ids}

    def text(self, sampling: SamplingParams, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens in an output."""
        assert self._tokenizer is not None
        return self._tokenizer.decode(token_ids, skip_special_tokens=sampling.skip_special_tokens)

    def _known_or_compiled(self, *wanted: Any) -> Structure:
        while True:
            with self._known_lock:
                found = self._known.get(wanted)
                future = self._known[wanted] = found or Future()
                self._known.move_to_end(wanted)
                if len(self._known) > NUM_KNOWN:
                    self._known.popitem(last=False)
            try:
                return self._compile_for_all(wanted, future) if found is None else future.result()
            except CancelledError:  # the other thread was interrupted
                continue

    def _compile_for_all(self, wanted: tuple[str, Any, bool], future: Future[Structure]) -> Structure:
        """Compiles a structure, and gives it to all threads that wait for it."""
        try:
            future.set_result(self._compiled(*wanted))
        except BaseException as error:
            with self._known_lock:
                if self._known.get(wanted) is future:
                    del self._known[wanted]
            if isinstance(error, ValueError):
                future.set_exception(error)
            else:
                future.cancel()
            raise
        return future.result()

    def _compiled(self, kind: str, value: Any, is_free: bool) -> Structure:
        _require_short(kind, value)
        if self._tokenizer is None:
            raise ValueError(f"{kind}={shown(value)} needs a tokenizer, which this checkpoint does not have")
        require_packages(kind)
        trial = self._trials.run(kind, value)
        forcing = '%llguidance {"no_forcing": true}\n' if is_free else ""
        matcher = _matcher_of(kind, value, forcing + trial.grammar, self._tokens())
        check = schema_checker(value) if kind == "json_schema" else None
        key_tokens = self._tokens_with_keys() if trial.can_repeat_keys else None
        return Structure(matcher, check, key_tokens, trial.can_run_out_of_keys)

    def must_compile(self, sampling: SamplingParams) -> bool:
        """True if the structures of an output or an answer take time to compile: not all are compiled yet."""
        wanted = {sampling.structure} - {None}
        if isinstance(sampling, AnswerParams):
            shape = sampling.shape
            wanted |= {("grammar", text) for text in (shape.before, shape.content, shape.calls) if text}
        if not wanted:
            return False
        with self._known_lock:
            done = {key[:2] for key, future in self._known.items() if future.done()}
        return not wanted <= done

    def _tokens(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        assert self._tokenizer is not None
        with self._tokens_lock:
            if self._llg_tokenizer is None:
                eos = self._eos_token_ids or None
                tokenizer = self._tokenizer.to_json(self._vocab_size)
                self._llg_tokenizer = LLTokenizer(tokenizer, n_vocab=self._vocab_size, eos_token=eos)
            return self._llg_tokenizer

    def _tokens_with_keys(self) -> KeyTokens:
        tokens = self._tokens()
        with self._tokens_lock:
            if self._key_tokens is None:
                self._key_tokens = KeyTokens([tokens.decode_bytes([token_id]) for token_id in range(self._vocab_size)])
            return self._key_tokens


def check_structure(sampling: SamplingParams) -> None:
    """Raises ValueError, before there is a model, for a structure that cannot be compiled for any.

    A grammar that names tokens is left to the model that has them.
    """
    if sampling.structure is not None:
        kind, value = sampling.structure
        _require_short(kind, value)
        require_packages(kind)
        if kind == "grammar" and NAMED_TOKEN.search(value):
            return
        _matcher_of(kind, value, for_bytes(Trials().run(kind, value).grammar), byte_tokenizer())


def _require_short(kind: str, value: Any) -> None:
    count = sum(map(len, value))  # of a text its characters, of choices those of each
    if count > MAX_CHARACTERS:
        raise ValueError(f"{kind} has {count:,} characters; give at most {MAX_CHARACTERS:,}")


def _matcher_of(kind: str, value: Any, grammar: str, tokens: LLTokenizer) -> LLMatcher:
    """Returns the matcher of a structure that was compiled for trial; ValueError if it has no beginning."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokens, grammar, log_level=0)
    if matcher.is_error():
        raise ValueError(f"{kind}={shown(value)} cannot be compiled: {_cut(matcher.get_error())}")
    beginning = matcher.deep_copy()
    beginning.compute_bitmask()
    if beginning.is_error():
        reason, _, _ = beginning.get_error().partition("\n")
        raise ValueError(f"{kind}={shown(value)} admits no output: {_cut(reason)}")
    return matcher


def _clear(mask: np.ndarray, token_id: int) -> None:
    mask[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))


def _cut(message: object) -> str:
    text = str(message)
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]} … ({len(text):,} characters)"
