"""HTML of tables, bars, coloured tokens and spans for notebooks: no scripts, inline styles, all text escaped."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

MAX_SPANS = 1000  # of one plot; an output cell of more makes a browser slow
MAX_TOKENS = 10_000  # of one view of tokens, for the same reason
# Pixels of a plot: its spans, the height of a lane, the names of the lanes, and the half of a time beyond the spans.
WIDTH, LANE, LABEL, MARGIN = 800, 16, 90, 30
MAX_TICKS = 8  # of a time axis
UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}  # of its times
# Colours that both a white and a black page show. Text keeps the notebook's own colour.
COLORS = ("#4c8bf5", "#e8892b", "#3aa757", "#d9463e", "#8e7cc3")


class Span(NamedTuple):
    """A part of a lane, in seconds from the start of the plot."""

    lane: str
    kind: str
    began: float
    ended: float


@dataclass(frozen=True)
class TokenView:
    """Tokens that a notebook colours by probability; `str` of it is their text."""

    tokens: tuple[str, ...]
    log_probs: tuple[float, ...]  # of the tokens
    alternatives: tuple[tuple[tuple[str, float], ...], ...]  # per token its alternatives with log-probabilities

    @classmethod
    def of(cls, completion: Any, text_of: Callable[[int], str]) -> TokenView:
        """Returns the tokens of a completion; `text_of` returns the text of a token id."""
        return cls(
            tokens=tuple(map(text_of, completion.token_ids)),
            log_probs=completion.log_probs,
            alternatives=tuple(
                tuple((text_of(token_id), value) for token_id, value in listed.items())
                for listed in completion.top_log_probs
            ),
        )

    def __str__(self) -> str:
        return "".join(self.tokens)

    def _repr_html_(self) -> str:
        described = zip(self.tokens, self.log_probs, self.alternatives or ((),) * len(self.tokens), strict=True)
        parts = [_token(*part) for part, _ in zip(described, range(MAX_TOKENS), strict=False)]
        num_left = len(self.tokens) - len(parts)
        further = f" … {num_left} further tokens" if num_left > 0 else ""
        return f'<div style="white-space:pre-wrap;line-height:1.7">{"".join(parts)}{further}</div>'


def table(rows: Mapping[str, object]) -> str:
    """Returns a table of two columns: names and values."""
    cells = (
        f'<tr><td style="text-align:left">{escape(name)}</td>'
        f'<td style="text-align:right">{escape(str(value))}</td></tr>'
        for name, value in rows.items()
    )
    return f"<table>{''.join(cells)}</table>"


def bar(parts: Mapping[str, int], limit: int | None) -> str:
    """Returns a bar of parts in bytes, as long as `limit` or, without one, as their sum; a legend names each part."""
    total = max(sum(parts.values()), limit or 0, 1)
    pieces, names = [], []
    for color, (name, num_bytes) in zip(_colors(parts), parts.items(), strict=True):
        pieces.append(f'<div style="width:{100 * num_bytes / total:.3f}%;background:{color}"></div>')
        names.append(f"{_mark(color)}{escape(name)} {num_bytes / 1e6:,.1f} MB")
    if limit is not None:
        names.append(f"of {limit / 1e6:,.1f} MB")
    frame = f"display:flex;max-width:{WIDTH}px;height:{LANE}px;border:1px solid #888"
    return f'<div style="{frame}">{"".join(pieces)}</div><div>{" &nbsp; ".join(names)}</div>'


def lanes(spans: Iterable[Span], kinds: Sequence[str]) -> str:
    """Returns an SVG with a lane of coloured spans per name, the last MAX_SPANS of them, and a time axis below.

    A title describes each span. A column that is narrower than the plot scales it.
    """
    kept = list(spans)[-MAX_SPANS:]
    rows = {name: LANE * i for i, name in enumerate(dict.fromkeys(span.lane for span in kept))}
    start, end = min((span.began for span in kept), default=0.0), max((span.ended for span in kept), default=0.0)
    scale = WIDTH / max(end - start, 1e-9)
    colors = dict(zip(kinds, _colors(kinds), strict=True))
    parts = []
    bottom = LANE * len(rows)
    for moment, label in _ticks(start, end):
        x = LABEL + scale * (moment - start)
        parts.append(f'<line x1="{x:.2f}" x2="{x:.2f}" y1="0" y2="{bottom + 3}" stroke="#888" stroke-opacity="0.5"/>')
        parts.append(_text(x, bottom + 14, label, "middle"))
    for name, y in rows.items():
        parts.append(_text(0, y + 12, name))
    for span in kept:
        x, width = LABEL + scale * (span.began - start), max(scale * (span.ended - span.began), 0.5)
        seconds = f"{span.began:.4f} s to {span.ended:.4f} s"
        parts.append(
            f'<rect x="{x:.2f}" y="{rows[span.lane] + 2}" width="{width:.2f}" height="{LANE - 4}"'
            f' fill="{colors[span.kind]}"><title>{escape(f"{span.lane}: {span.kind}, {seconds}")}</title></rect>'
        )
    legend = " &nbsp; ".join(f"{_mark(color)}{escape(kind)}" for kind, color in colors.items())
    width, height = LABEL + WIDTH + MARGIN, LANE * (len(rows) + 1)
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}" style="max-width:100%;height:auto"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(parts)}</svg><div>{legend}</div>'


def _ticks(start: float, end: float) -> list[tuple[float, str]]:
    """Returns at most MAX_TICKS round times from `start` to `end`, in seconds and as labels with a unit."""
    if end <= start:
        return []
    shortest = (end - start) / (MAX_TICKS - 1)
    power = 10.0 ** math.floor(math.log10(shortest))
    step = power * next((digit for digit in (1, 2, 5) if power * digit >= shortest), 10)
    unit = next((name for name, seconds in UNITS.items() if step >= seconds / 10), "µs")
    num_decimals = max(0, -math.floor(math.log10(step / UNITS[unit]) + 1e-9))  # log10 of a power may be a bit too small
    moments = [index * step for index in range(math.ceil(start / step), math.floor(end / step) + 1)]
    return [(moment, f"{moment / UNITS[unit]:.{num_decimals}f} {unit}") for moment in moments]


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    place = f'x="{x:.2f}" y="{y}" text-anchor="{anchor}"'
    return f'<text {place} font-size="11" fill="currentColor">{escape(text)}</text>'


def _token(text: str, log_prob: float, alternatives: Sequence[tuple[str, float]]) -> str:
    """Returns a token on a red ground that fades with its probability; hovering shows that and the alternatives."""
    probability = math.exp(min(log_prob, 0.0))
    lines = [f"{probability:.1%}", *(f"{other!r} {math.exp(min(value, 0.0)):.1%}" for other, value in alternatives)]
    title = escape("\n".join(lines)).replace("\n", "&#10;")
    ground = f"rgba(217,70,62,{0.6 * (1 - probability):.3f})"
    return f'<span style="background:{ground};border-radius:3px" title="{title}">{escape(text)}</span>'


def _colors(names: Iterable[str]) -> list[str]:
    return [COLORS[i % len(COLORS)] for i, _ in enumerate(names)]


def _mark(color: str) -> str:
    return f'<span style="color:{color}">&#9632;</span> '
