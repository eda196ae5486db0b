"""Plots a timeline: requests per step, used pages, and the phases of each request."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxinfer.engine.timeline import PHASES, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {"queue": "0.8", "prefill": "tab:orange", "decode": "tab:blue", "preempted": "tab:red", "verify": "tab:green"}


def require_matplotlib() -> None:
    """Raises ValueError if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise ValueError("a plot needs matplotlib, which is not installed: pip install 'jaxinfer[plot]'")


def plot_timeline(timeline: Timeline, path: str | Path) -> None:
    """Writes a PNG; ValueError without matplotlib, or for a timeline without steps."""
    require_matplotlib()
    if not timeline.steps:
        raise ValueError("the timeline has no step, so there is nothing to plot")
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(12, 10), layout="constrained")
    rows, pages, requests = figure.subplots(3, 1, sharex=True, height_ratios=(1, 1, 2))
    _plot_rows(rows, timeline)
    _plot_pages(pages, timeline)
    _plot_requests(requests, timeline)
    requests.set_xlabel("seconds")
    figure.savefig(path, format="png", dpi=120)


def _plot_rows(axes: Axes, timeline: Timeline) -> None:
    for kind in ("decode", "verify", "prefill"):
        steps = [step for step in timeline.steps if step.kind == kind]
        # moments: began 0, ended 0, began 1, ended 1, …; rows rise when a step begins and drop to 0 when it ends
        moments = np.array([(step.began, step.ended) for step in steps]).reshape(-1) - timeline.start
        num_rows = np.array([(step.num_rows, 0) for step in steps]).reshape(-1)
        if steps:
            axes.fill_between(moments, num_rows, step="post", color=COLORS[kind], linewidth=0, label=kind)
    axes.set_ylabel("requests in the step")
    axes.legend(loc="upper right")


def _plot_pages(axes: Axes, timeline: Timeline) -> None:
    loads = [*timeline.loads, timeline.loads[-1]._replace(moment=timeline.steps[-1].ended)]
    moments = np.array([load.moment for load in loads]) - timeline.start
    owned = np.array([load.num_owned_pages for load in loads])
    cached = np.array([load.num_cached_pages for load in loads])
    axes.fill_between(moments, owned, step="post", color=COLORS["decode"], linewidth=0, label="used")
    axes.fill_between(moments, owned, owned + cached, step="post", color=COLORS["queue"], linewidth=0, label="cached")
    axes.axhline(timeline.num_pages, color="black", linewidth=0.8, label="all")
    axes.set_ylabel("pages")
    axes.legend(loc="upper right")


def _plot_requests(axes: Axes, timeline: Timeline) -> None:
    from matplotlib.collections import PolyCollection

    ids = sorted({span.request_id for span in timeline.spans})
    places = {request_id: place for place, request_id in enumerate(ids)}
    for phase in PHASES:
        boxes = [
            _box(span.began - timeline.start, span.ended - timeline.start, places[span.request_id])
            for span in timeline.spans
            if span.phase == phase
        ]
        if boxes:
            axes.add_collection(PolyCollection(boxes, facecolors=COLORS[phase], label=phase))
    axes.autoscale_view()
    axes.invert_yaxis()
    axes.set_ylabel("requests by id")
    axes.legend(loc="upper right")


def _box(left: float, right: float, place: int) -> list[tuple[float, float]]:
    return [(left, place), (right, place), (right, place + 1), (left, place + 1)]
