"""Patterns mean what ECMA-262 says of them, whoever follows them; the tables are those of its definition."""

from __future__ import annotations

import sys
import unicodedata

import pytest

from jaxinfer.text.ecmascript_regex import to_rust
from jaxinfer.text.json_schema import is_matched, matcher_of

pytest.importorskip("llguidance")

CHARACTERS = [chr(point) for point in (*range(0x3400), *range(0xF900, 0x10000), *range(0x1F600, 0x1F610))]
# ECMA-262: WhiteSpace (12.2) with all of category Zs, and LineTerminator (12.3).
LINE_TERMINATORS = set("\n\r\u2028\u2029")
SPACES = set("\t\v\f\ufeff") | LINE_TERMINATORS | {c for c in CHARACTERS if unicodedata.category(c) == "Zs"}
DIGITS = set("0123456789")
WORD_CHARACTERS = DIGITS | set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")


def matches(pattern, *texts):
    """Which of some texts a pattern matches."""
    matcher = matcher_of(to_rust(pattern))
    assert not matcher.is_error() or "Regex is empty" in matcher.get_error()
    return [text for text in texts if is_matched(matcher, text)]


@pytest.mark.parametrize(
    ("positive", "negative", "members"),
    [
        (r"\s", r"\S", SPACES),
        (r"\d", r"\D", DIGITS),
        (r"\w", r"\W", WORD_CHARACTERS),
        (r"[\n\r\u2028\u2029]", ".", LINE_TERMINATORS),
    ],
)
def test_a_class_has_the_characters_of_the_standard(positive, negative, members):
    others = [c for c in CHARACTERS if c not in members]
    all_members, all_others = "".join(sorted(members)), "".join(others)

    assert matches(f"^{positive}*$", all_members) == [all_members]
    assert matches(f"^{negative}*$", all_others) == [all_others]
    assert matches(f"^{positive}$", *others) == []
    assert matches(f"^{negative}$", *members) == []


TEXTS = ["", "a", "A", "b", "ab", "aab", "a\nb", "1", "é", "É", "\ufeff", "\u0085", "😀", "a-b", "]", "{", "{,3}"]
MEANINGS = {
    "anywhere": ("a", ["a", "ab", "aab", "a\nb", "a-b"]),
    "whole": ("^a$", ["a"]),
    "start": ("^a", ["a", "ab", "aab", "a\nb", "a-b"]),
    "end": ("b$", ["b", "ab", "aab", "a\nb", "a-b"]),
    "empty": ("^$", [""]),
    "one end of several": ("^a$|b$", ["a", "b", "ab", "aab", "a\nb", "a-b"]),
    "groups": ("^(?<stop>a)(?:a)(b)$", ["aab"]),
    "lazy": ("^a{2,3}?b+?$", ["aab"]),
    "dot": ("^a.b$", ["aab", "a-b"]),
    "every dot": ("^(?s:a.b)$", ["aab", "a\nb", "a-b"]),
    "dot after a group": ("^(?s:a).b$", ["aab", "a-b"]),
    "case": ("^(?i:[a]|é)$", ["a", "A", "é", "É"]),
    "case again": ("^(?i:(?-i:a)|é)$", ["a", "é", "É"]),
    "kelvin": ("^(?i:[\\W])$", ["é", "É", "\ufeff", "\u0085", "😀", "]", "{"]),
    "space": (r"^\s$", ["\ufeff"]),
    "class": ("^[a-]$", ["a"]),
    "brackets": (r"^[\]{]$", ["]", "{"]),
    "lone brackets": ("^]$|^{$", ["]", "{"]),
    "no class of Rust": ("^[a&&b]$", ["a", "b"]),
    "no nested class": ("^[[a]$", ["a"]),
    "empty class": ("[]", []),
    "any class": ("^[^]$", ["a", "A", "b", "1", "é", "É", "\ufeff", "\u0085", "😀", "]", "{"]),
    "no character": (r"[^\s\S]|[\ud800-\udfff]|[^\0-\ud7ff\ue000-\u{10ffff}]", []),
    "halves of a pair": (r"^\ud83d\ude00$", ["😀"]),
    "range of pairs": (r"^[\ud83d\ude00-\u{1F601}]$", ["😀"]),
    "code points": (r"^(\x61|\u0062|\u{31}|\cA)$", ["a", "b", "1"]),
    "escapes": (r"^a\nb$|^a\-b$|^\]$", ["a\nb", "a-b", "]"]),
    "property": (r"^[\p{Lu}\d]$", ["A", "1", "É"]),
    "no property": (r"^\P{L}$", ["1", "\ufeff", "\u0085", "😀", "]", "{"]),
}


@pytest.mark.parametrize(("pattern", "expected"), MEANINGS.values(), ids=MEANINGS)
def test_a_pattern_matches_what_the_standard_says(pattern, expected):
    assert matches(pattern, *TEXTS) == expected


# In a JSON string `llguidance` takes a class with all control characters to have these two as well.
LEFT_OUT = {
    r'^[^"]*$': '"',
    r"^[^\\]*$": "\\",
    r'^[^"\\]+$': '"\\',
    r'^([^\n"]|\n)*$': '"',
    r"^[\0-\x1f]*$": '"\\',
    r"^\P{P}$": '"\\',
}


@pytest.mark.parametrize(("pattern", "left_out"), LEFT_OUT.items(), ids=LEFT_OUT)
def test_a_class_without_quotation_marks_or_backslashes_has_none(pattern, left_out):
    assert matches(pattern, *left_out) == []
    assert matches(pattern, "\n", "\x1f") == ["\n", "\x1f"]


REFUSED = {
    "look ahead": ("a(?=b)", r"has \(\?=, which looks at the text around it; spell out"),
    "look behind": ("(?<!a)b", r"has \(\?<!, which looks at the text around it"),
    "word end": (r"a\b", r"has \\b, which looks at the text around it"),
    "reference": (r"(a)\1", r"has \\1, which refers back to a group; spell out"),
    "reference by name": (r"(?<n>a)\k<n>", r"has \\k, which refers back to a group"),
    "Python's flags": ("(?i)a", r"has '\(\?i\)', which begins none of the groups .* \(\?i:…\)"),
    "Python's names": ("(?P<n>a)", r"has '\(\?P<', which begins none of the groups"),
    "line by line": ("(?m:^a)", r"has '\(\?m:', which begins none"),
    "Python's start": (r"\Aa", r"has \\A, which ECMAScript does not have"),
    "bare property": (r"\pL", r"has \\p, which ECMAScript does not have"),
    "octal": (r"\07", r"has \\0, which"),
    "end": ("a\\", r"has \\, which ECMAScript does not have"),
    "without a least number": ("a{,3}", r"has a repetition without its least number; write \{0,"),
    "nothing": ("*a", r"has nothing that \* could repeat"),
    "twice": ("a**", r"has nothing that \* could repeat"),
    "anchor": ("^*", r"has nothing that \* could repeat"),
    "open group": ("(a", r"has a group without its \)"),
    "close group": ("a)", r"has a \) without its group"),
    "open class": ("[a", r"has a class without its \]"),
    "open escape": ("[\\", r"has \\, which"),
    "range": ("[b-a]", r"has a range whose end is before its start, b-a"),
    "too far": (r"\u{110000}", "is beyond the last character"),
    "blind negation": (r"(?i:\P{Lu})", r"has \\P\{Lu\} in a group \(\?i:…\), where it has another meaning"),
}


@pytest.mark.parametrize(("pattern", "message"), REFUSED.values(), ids=REFUSED)
def test_a_pattern_that_cannot_be_followed_is_refused_with_the_reason(pattern, message):
    with pytest.raises(ValueError, match=f"^the pattern .* {message}"):
        to_rust(pattern)


def test_a_deep_pattern_is_translated():
    depth = 2 * sys.getrecursionlimit()

    assert to_rust("(" * depth + ")" * depth) == "(?:" * depth + ")" * depth
