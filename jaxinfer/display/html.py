"""HTML of tables, bars, coloured tokens and spans for notebooks: no scripts, inline styles, all text escaped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

MAX_SPANS = 1000  # of one plot; an output cell of more makes a browser slow
MAX_TOKENS = 10_000  # of one view of tokens, for the same reason
WIDTH, LANE, LABEL = 800, 16, 90  # pixels of a plot: its spans, the height of a lane, the names of the lanes
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
    """Returns an SVG with a lane of coloured spans per name, the last MAX_SPANS of them; a title describes each."""
    kept = list(spans)[-MAX_SPANS:]
    rows = {name: LANE * i for i, name in enumerate(dict.fromkeys(span.lane for span in kept))}
    start = min((span.began for span in kept), default=0.0)
    scale = WIDTH / max(max((span.ended for span in kept), default=0.0) - start, 1e-9)
    colors = dict(zip(kinds, _colors(kinds), strict=True))
    parts = []
    for name, y in rows.items():
        parts.append(f'<text x="0" y="{y + 12}" font-size="11" fill="currentColor">{escape(name)}</text>')
    for span in kept:
        x, width = LABEL + scale * (span.began - start), max(scale * (span.ended - span.began), 0.5)
        seconds = f"{span.began:.4f} s to {span.ended:.4f} s"
        parts.append(
            f'<rect x="{x:.2f}" y="{rows[span.lane] + 2}" width="{width:.2f}" height="{LANE - 4}"'
            f' fill="{colors[span.kind]}"><title>{escape(f"{span.lane}: {span.kind}, {seconds}")}</title></rect>'
        )
    legend = " &nbsp; ".join(f"{_mark(color)}{escape(kind)}" for kind, color in colors.items())
    size = f'width="{LABEL + WIDTH}" height="{LANE * len(rows)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(parts)}</svg><div>{legend}</div>'


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
