"""The HTML that a notebook shows, read as a browser reads it."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from jaxinfer.display.html import COLORS, MAX_SPANS, MAX_TOKENS, Span, TokenView, bar, lanes, table

HOSTILE = "<script>alert('1')</script> \"quoted\" onload=x &amp; </span>"


class Page(HTMLParser):
    """The tags, titles and text of a piece of HTML, as a browser reads them; every tag must be closed in order."""

    def __init__(self, source):
        super().__init__()
        self.tags, self.attributes, self.text, self._open = [], [], "", []
        self.feed(source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append(dict(attrs))
        self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def titles(self):
        return [attributes["title"] for attributes in self.attributes if "title" in attributes]


def test_hostile_tokens_are_text_and_nothing_else():
    view = TokenView((HOSTILE, "b"), (math.log(0.25), 0.0), (((HOSTILE, -1.0),), ()))

    page = Page(view._repr_html_())

    assert page.tags == ["div", "span", "span"]
    assert page.text == HOSTILE + "b" == str(view)
    assert page.titles() == [f"25.0%\n{HOSTILE!r} 36.8%", "100.0%"]
    assert all(set(attributes) <= {"style", "title"} for attributes in page.attributes)


def test_hostile_names_of_rows_parts_and_lanes_are_text():
    assert Page(table({HOSTILE: HOSTILE})).text == HOSTILE * 2
    assert set(Page(bar({HOSTILE: 1}, None)).tags) == {"div", "span"}
    drawn = {"svg", "line", "text", "rect", "title", "div", "span"}
    assert set(Page(lanes([Span(HOSTILE, "a", 0, 1)], ["a"])).tags) == drawn


def test_the_ground_fades_with_probability():
    page = Page(TokenView(("a", "b", "c"), (-math.inf, math.log(0.5), 0.0), ())._repr_html_())

    grounds = [attributes["style"].split(",")[3].split(")")[0] for attributes in page.attributes[1:]]
    assert grounds == ["0.600", "0.300", "0.000"]


def test_a_long_completion_is_cut_and_says_so():
    num_tokens = MAX_TOKENS + 3

    page = Page(TokenView(("x",) * num_tokens, (0.0,) * num_tokens, ())._repr_html_())

    assert page.tags.count("span") == MAX_TOKENS
    assert page.text.endswith(" … 3 further tokens")


def test_a_bar_is_as_long_as_its_limit():
    page = Page(bar({"a": 30, "b": 20}, 100))

    widths = [a["style"].split(";")[0] for a in page.attributes if a.get("style", "").startswith("width")]
    assert widths == ["width:30.000%", "width:20.000%"]
    assert Page(bar({"a": 0}, None)).tags


def test_lanes_keep_the_last_spans_in_order_and_to_scale():
    spans = [Span(f"lane {i % 3}", "ab"[i % 2], float(i), float(i + 1)) for i in range(MAX_SPANS + 5)]

    page = Page(lanes(spans, ["a", "b"]))

    rects = [attributes for attributes in page.attributes if "fill" in attributes and "width" in attributes]
    assert len(rects) == MAX_SPANS
    assert [rect["fill"] for rect in rects[:2]] == [COLORS[1], COLORS[0]]
    assert float(rects[1]["x"]) - float(rects[0]["x"]) == pytest.approx(800 / MAX_SPANS, abs=0.01)
    assert Page(lanes([], ["a"])).tags[0] == "svg"


def time_axis(began, ended):
    """Returns the places of the ticks of a plot with one span, and their labels."""
    plot = lanes([Span("", "a", began, ended)], ["a"])
    return [float(x) for x in re.findall('<line x1="(.*?)"', plot)], re.findall('"middle".*?>(.*?)</text>', plot)


@pytest.mark.parametrize(
    ("began", "ended", "labels"),
    [
        (0.0, 1.0, ["0.0 s", "0.2 s", "0.4 s", "0.6 s", "0.8 s", "1.0 s"]),
        (0.0, 0.03, ["0 ms", "5 ms", "10 ms", "15 ms", "20 ms", "25 ms", "30 ms"]),
        (12.34, 12.36, ["12340 ms", "12345 ms", "12350 ms", "12355 ms", "12360 ms"]),
        (0.0, 3600.0, ["0 s", "1000 s", "2000 s", "3000 s"]),
        (0.0, 7e-7, ["0.0 µs", "0.1 µs", "0.2 µs", "0.3 µs", "0.4 µs", "0.5 µs", "0.6 µs", "0.7 µs"]),
    ],
)
def test_the_time_axis_has_round_times_with_a_unit_in_their_places(began, ended, labels):
    ticks, found = time_axis(began, ended)

    seconds = [float(label.split()[0]) * {"s": 1, "ms": 1e-3, "µs": 1e-6}[label.split()[1]] for label in labels]
    assert found == labels
    np.testing.assert_allclose(ticks, [90 + 800 * (s - began) / (ended - began) for s in seconds], atol=0.01)


@pytest.mark.parametrize("power", range(-9, 6))
@pytest.mark.parametrize("digits", [1.0, 1.4, 2.1, 3.5, 6.9, 7.0, 9.99])
def test_the_time_axis_of_any_plot_has_three_to_eight_labels_that_differ(power, digits):
    _, labels = time_axis(0.0, digits * 10.0**power)

    assert 3 <= len(labels) == len(set(labels)) <= 8


def test_a_narrow_column_scales_a_plot_instead_of_cutting_it_off():
    plot = Page(lanes([Span("a", "a", 0, 1), Span("b", "a", 1, 2)], ["a"])).attributes[0]

    assert plot["viewbox"] == f"0 0 {plot['width']} {plot['height']}"  # the parser's names are in lower case
    assert plot["style"] == "max-width:100%;height:auto"
