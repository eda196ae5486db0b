"""Translates regular expressions of ECMAScript, which JSON Schema has, to those of Rust, which `llguidance` reads.

The meaning is that of ECMAScript 2025 with the flag `u`. Text that this flag refuses, but that has one meaning without
it, such as `\\@` or a lone `}`, keeps that meaning.
"""

from __future__ import annotations

import re

from jaxinfer.validation import shown

Ranges = list[tuple[int, int]]  # of code points, both ends included

MAX_CODE_POINT = 0x10FFFF
SURROGATES = range(0xD800, 0xE000)  # no text has one alone
LINE_ENDS: Ranges = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]
CLASSES: dict[str, Ranges] = {
    "d": [(0x30, 0x39)],
    "w": [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
    # WhiteSpace and LineTerminator of ECMA-262: unlike Rust's with U+FEFF, and without U+0085.
    "s": [
        *[(0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)],
        *[(0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)],
    ],
}
ALSO_IN_WORDS: Ranges = [(0x17F, 0x17F), (0x212A, 0x212A)]  # if case does not count: these are an s and a k
CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}

ESCAPE = re.compile(
    r"\\(?: (?P<cls>[dswDSW]) | (?P<property>[pP]\{\w+(?:=\w+)?\}) | (?P<control>[tnvfr]) | c(?P<letter>[A-Za-z])"
    r" | (?P<zero>0(?![0-9])) | x(?P<hex>[0-9a-fA-F]{2}) | u\{(?P<point>[0-9a-fA-F]+)\}"
    r" | u(?P<high>[dD][89abAB][0-9a-fA-F]{2})\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{2}) | u(?P<unit>[0-9a-fA-F]{4})"
    r" | (?P<itself>[^0-9A-Za-z]) )",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
QUANTIFIER = re.compile(r"(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})\??", re.ASCII)
OPENER = re.compile(r"\((?:\?(?::|<[\w$]+>|(?P<on>[is]*)(?:-(?P<off>[is]+))?:))?")
LOOK = re.compile(r"\(\?<?[=!]|\\[bB]")


def to_rust(pattern: str) -> str:
    """Returns a pattern in Rust's notation.

    Raises ValueError, with the reason, for one that ECMAScript does not have, and for one that looks around or refers
    back, which `llguidance` cannot follow.
    """
    return _Translation(pattern).run()


class _Translation:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        # Of each group that is open: does a dot also mean a line's end, and does case not count?
        self._flags: list[tuple[bool, bool]] = [(False, False)]

    def run(self) -> str:
        parts = []
        while self._at < len(self._pattern):
            part, is_atom = self._term()
            parts.append(part)
            quantifier = QUANTIFIER.match(self._pattern, self._at)
            if quantifier is not None:
                if not is_atom:
                    raise self._wrong(f"has nothing that {quantifier[0]} could repeat")
                parts.append(quantifier[0])
                self._at = quantifier.end()
        if len(self._flags) > 1:
            raise self._wrong("has a group without its )")
        return "".join(parts)

    def _term(self) -> tuple[str, bool]:
        """Returns the next term, and whether it is one that a quantifier may follow."""
        pattern, at = self._pattern, self._at
        character = pattern[at]
        if look := LOOK.match(pattern, at):
            raise self._wrong(f"has {look[0]}, which looks at the text around it; spell out the text that may be there")
        if character == "\\":
            return self._class_of(self._escape()), True
        if character == "(":
            return self._open(), False
        self._at += 1
        if character == "[":
            return self._class(), True
        if character == ")":
            if len(self._flags) == 1:
                raise self._wrong("has a ) without its group")
            self._flags.pop()
            return ")", True
        if character == ".":
            return _class_text([] if self._flags[-1][0] else LINE_ENDS, is_negated=True), True
        if character in "^$|":
            return character, False
        if character in "*+?" or (character == "{" and QUANTIFIER.match(pattern, at)):
            raise self._wrong(f"has nothing that {character} could repeat")
        if character == "{" and pattern[at + 1 : at + 2] == ",":
            raise self._wrong("has a repetition without its least number; write {0,")
        return _character(ord(character)), True

    def _open(self) -> str:
        opener = OPENER.match(self._pattern, self._at)
        assert opener is not None
        self._at = opener.end()
        if opener[0] == "(" and self._pattern.startswith("?", self._at):
            start = shown(self._pattern[opener.start() : self._at + 3])
            raise self._wrong(f"has {start}, which begins none of the groups (…), (?:…), (?<name>…), (?i:…) and (?s:…)")
        on, off = opener["on"] or "", opener["off"] or ""
        has_all_dots, is_blind = self._flags[-1]
        self._flags.append(("s" in on or (has_all_dots and "s" not in off), "i" in on or (is_blind and "i" not in off)))
        if self._flags[-1][1] == is_blind:
            return "(?:"
        return "(?-i:" if is_blind else "(?i:"

    def _class(self) -> str:
        """Returns the class of characters whose [ was just read."""
        is_negated = self._pattern.startswith("^", self._at)
        self._at += is_negated
        ranges: Ranges = []
        properties = ""
        while not self._pattern.startswith("]", self._at):
            first = self._member()
            has_more = self._pattern.startswith("-", self._at) and not self._pattern.startswith("-]", self._at)
            if isinstance(first, int) and has_more:
                start = self._at
                self._at += 1
                last = self._member()
                if not isinstance(last, int):
                    self._at, last = start, first
                elif last < first:
                    raise self._wrong(f"has a range whose end is before its start, {chr(first)}-{chr(last)}")
                ranges.append((first, last))
            elif isinstance(first, int):
                ranges.append((first, first))
            elif isinstance(first, str):
                properties += first
            else:
                ranges += first
        self._at += 1
        return _class_text(ranges, properties, is_negated=is_negated)

    def _member(self) -> int | Ranges | str:
        """Returns the next character of a class, or the ranges or the property that an escape in it means."""
        if self._at == len(self._pattern):
            raise self._wrong("has a class without its ]")
        if self._pattern.startswith("\\b", self._at):
            self._at += 2
            return 0x08
        if self._pattern[self._at] == "\\":
            return self._escape()
        self._at += 1
        return ord(self._pattern[self._at - 1])

    def _escape(self) -> int | Ranges | str:
        escape = ESCAPE.match(self._pattern, self._at)
        if escape is None:
            start = self._pattern[self._at : self._at + 2]
            if start[1:].isdigit() or start == "\\k":
                raise self._wrong(f"has {start}, which refers back to a group; spell out the text that may be there")
            raise self._wrong(f"has {start}, which ECMAScript does not have")
        self._at = escape.end()
        kind, text = escape.lastgroup, escape[escape.lastgroup or 0]
        is_blind = self._flags[-1][1]
        if kind == "cls":
            ranges = CLASSES[text.lower()] + (ALSO_IN_WORDS if text == "W" and is_blind else [])
            return ranges if text.islower() else _complement(ranges)
        if kind == "property":
            if text[0] == "P" and is_blind:
                raise self._wrong(f"has {escape[0]} in a group (?i:…), where it has another meaning; write [^…]")
            return f"\\{text}"
        if kind == "control":
            return CONTROLS[text]
        if kind == "low":
            high, low = int(escape["high"], 16), int(text, 16)
            return 0x10000 + ((high & 0x3FF) << 10) + (low & 0x3FF)
        if kind == "letter":
            return ord(text) % 32
        if kind == "itself":
            return ord(text)
        point = int(text, 16)
        if point > MAX_CODE_POINT:
            raise self._wrong(f"has {escape[0]}, which is beyond the last character")
        return point

    def _class_of(self, meant: int | Ranges | str) -> str:
        if isinstance(meant, int):
            return _character(meant)
        return _class_text([], meant) if isinstance(meant, str) else _class_text(meant)

    def _wrong(self, reason: str) -> ValueError:
        return ValueError(f"the pattern {shown(self._pattern)} {reason}")


def _complement(ranges: Ranges) -> Ranges:
    """Returns the code points outside of ranges that are in order and apart."""
    starts = [0, *(last + 1 for _, last in ranges)]
    ends = [*(first - 1 for first, _ in ranges), MAX_CODE_POINT]
    return [(first, last) for first, last in zip(starts, ends, strict=True) if first <= last]


def _class_text(ranges: Ranges, properties: str = "", *, is_negated: bool = False) -> str:
    """Writes a class of characters, which has U+0000 only beside both quotation marks and backslashes.

    In a JSON string `llguidance` takes a class with all control characters to have these two as well.
    """

    def has(point: int) -> bool:
        return is_negated != any(first <= point <= last for first, last in ranges)

    if not properties and has(0) and not (has(ord('"')) and has(ord("\\"))):
        ranges = [*ranges, (0, 0)] if is_negated else [(max(first, 1), last) for first, last in ranges]
    ranges = _joined(ranges)
    if not ranges and not properties:  # Rust has no empty class
        ranges, is_negated = [(0, MAX_CODE_POINT)], not is_negated
    texts = (_character(first) + (f"-{_character(last)}" if last > first else "") for first, last in ranges)
    written = f"[{'^' * is_negated}{''.join(texts)}{properties}]"
    return f"[{written}--{_character(0)}]" if properties else written


def _joined(ranges: Ranges) -> Ranges:
    """Returns ranges in order and apart, without surrogates at their ends."""
    joined: Ranges = []
    for first, last in sorted(ranges):
        first = SURROGATES.stop if first in SURROGATES else first
        last = SURROGATES.start - 1 if last in SURROGATES else last
        end = joined[-1][1] if joined else -2
        end = SURROGATES[-1] if end == SURROGATES.start - 1 else end
        if first <= last and first <= end + 1:
            joined[-1] = joined[-1][0], max(last, joined[-1][1])
        elif first <= last:
            joined.append((first, last))
    return joined


def _character(point: int) -> str:
    if point in SURROGATES:
        return _class_text([(point, point)])
    character = chr(point)
    return character if character.isalnum() or character in " _" else f"\\x{{{point:X}}}"
