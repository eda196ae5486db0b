"""The kinds of pages of a model's layers, their pools, and the form of a model whose full pages are rounded.

tokens          |  page 0  |  page 1  |  page 2  |  page 3  |   of a request that decodes in page 3
all tokens      | rounded  | rounded  | rounded  |  (none)  |   each page is rounded once, when it is full
open pages      |  freed   |  freed   |  freed   |  exact   |   `num_exact` 0: no page before the last token's
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from jaxinfer.model.components.attention import Attention
from jaxinfer.model.layer_parts import Mixer, functions_of, source_of

if TYPE_CHECKING:
    from jaxinfer.model.config import ModelConfig

# The full pages before a token's own that it reads exact from a cache in 2 bits. With 1 the bundled model loses 1.7 %
# for 2.2 %, but a prefix is found only at ends whose open page is still there.
NUM_EXACT = 0


@dataclass(frozen=True, kw_only=True)
class PageKind:
    """What a layer keeps of a request, and for how long. Each kind has its own pool, and a block table per request."""

    window: int | None = None  # the last tokens whose pages are kept; None: all
    is_state: bool = False  # the recurrent state after the last token
    num_exact: int | None = None  # of open pages: those kept before the page of the last token; None: no open pages

    def order(self) -> tuple[bool, bool, int]:
        """Returns the key by which the bounded kinds of a model are sorted: windows, states, open pages."""
        return self.num_exact is not None, self.is_state, self.window or 0

    def num_kept(self, page_size: int) -> int:
        """Returns the pages before that of the last token which a request keeps."""
        if self.num_exact is not None:
            return self.num_exact
        return 0 if self.window is None else -(-(self.window - 1) // page_size)


class MixerStack(NamedTuple):
    """The equal mixers of a stack of layers with pages of their own, which share a pool of them."""

    mixer: Mixer
    num_layers: int
    kind: int  # the index of its kind of pages in `ModelConfig.page_kinds`
    num_exact: int | None = None  # as in `PageKind`: of a second stack, of the same mixers' open pages


class PagePlace(NamedTuple):
    """The pages of the mixers of a stack: their own, or those of an earlier layer, which all of them read."""

    pool: int  # the index in `ModelConfig.mixer_stacks`
    layer: int | None = None  # of the earlier layer in that pool; None: each layer has its own
    is_shared: bool = False  # layers of another stack use the pool too
    open_pool: int | None = None  # the index of the pool of their open pages


def page_kind_of(mixer: Mixer) -> PageKind:
    """Returns the kind of the pages of a mixer, its open pages aside."""
    return PageKind(is_state=True) if functions_of(mixer).is_recurrent else PageKind(window=mixer.window)


def has_open_pages(mixer: Mixer) -> bool:
    """Returns True if a mixer has open pages, in a model with them."""
    return isinstance(mixer, Attention)


def with_open_pages(config: ModelConfig, num_exact: int) -> ModelConfig:
    """Returns the same model for a cache whose keys and values are rounded to 2 bits, page by page, when it is full.

    A token attends to exact keys and values of its own page and of the `num_exact` pages before it. These lie in open
    pages. It attends to rounded ones of all earlier pages.

    Raises ValueError for a model with layers for which no such pages are built, or without attention.
    """
    others = {functions_of(mixer) for mixer in config.mixers if not has_open_pages(mixer)}
    without_pages = sorted(functions.name for functions in others if not functions.is_recurrent)
    refused = {
        ", ".join(without_pages): bool(without_pages),
        "layers that read the keys and values of another": any(source_of(mixer) is not None for mixer in config.mixers),
        "no attention": not any(map(has_open_pages, config.mixers)),
    }
    for what, is_refused in refused.items():
        if is_refused:
            raise ValueError(
                f"keys and values in 2 bits are not built for a model with {what}; use another"
                " EngineConfig.cache_dtype, or leave it out"
            )
    return replace(config, num_exact=num_exact)
