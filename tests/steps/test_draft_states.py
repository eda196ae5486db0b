"""States of drafts have slots of their own, which a cache must have."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.config import CacheConfig
from jaxinfer.model.batch import PADDING_SLOT, Row, make_batch
from jaxinfer.model.cache import init_cache
from jaxinfer.model.components.recurrent.state_space import StateSpace
from jaxinfer.steps.verify import draft_state_slots, ends_of_tokens
from tests.model.components.recurrent.layers import model_of

CONFIG = model_of(StateSpace(num_heads=2, head_dim=4, num_groups=1, state_size=4, conv_size=4), 8)
BATCH = make_batch([Row([5, 6, 7], 2, [1])], page_size=16, num_tokens=4, num_rows=1, table_width=1)


def slots_with(num_draft_states: int, num_bounded_pages: tuple[int, ...] = ()):
    cache_config = CacheConfig(
        num_pages=6, page_size=16, num_bounded_pages=num_bounded_pages, num_draft_states=num_draft_states
    )
    return draft_state_slots(init_cache(CONFIG, cache_config), BATCH, ends_of_tokens(BATCH), config=CONFIG)


@pytest.mark.parametrize("num_bounded_pages", [(), (9,)], ids=str)
def test_the_state_after_each_draft_has_a_slot_past_those_of_pages(num_bounded_pages):
    slots = slots_with(5, num_bounded_pages)

    num_pages = num_bounded_pages[0] if num_bounded_pages else 6
    assert np.asarray(slots.writes).tolist() == [num_pages + 1, num_pages + 2, num_pages + 3, PADDING_SLOT]
    assert np.asarray(slots.reads).tolist() == [1]


@pytest.mark.parametrize("num_draft_states", [0, 3])
def test_a_cache_without_a_slot_for_each_token_of_a_verify_step_is_refused(num_draft_states):
    with pytest.raises(ValueError, match=f"num_draft_states={num_draft_states} .* 4 tokens"):
        slots_with(num_draft_states, (9,))
