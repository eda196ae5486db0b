"""What the decoder gives a mixer beside hidden states and pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh

from jaxinfer.model.batch import Batch, StepTokens
from jaxinfer.model.components.recurrent.states import StateSlots
from jaxinfer.model.components.rope import Rope
from kernels_pallas.paged_attention import AttentionCall
from kernels_pallas.whole_rows import PagedCall, PlainCall, attend_whole_rows

Angles = tuple[jax.Array, jax.Array]  # cosine and sine f32[T, 1, R/2]


@dataclass(frozen=True)
class MixerInputs:
    """The step, its angles and its slots, and where the mixer's pages are."""

    batch: Batch
    tokens: StepTokens
    q_len: int | None = None
    tree_mask: jax.Array | None = None
    implementation: str | None = None
    mesh: Mesh | None = None
    states: StateSlots | None = None  # if the model has a recurrent mixer
    num_whole_rows: int | None = None  # of a step that may be differentiated, see `forward`
    angles: Mapping[Rope, Angles] = field(default_factory=dict)  # of the tokens, for each rotary embedding
    page_offset: jax.Array | int = 0  # the index of the layer's first page in its pool
    is_shared: bool = False  # other layers write or read the pages too
    plan: Any = None  # of the step, for this mixer's kernel, see `plan_attention`

    def call(self, **of_layer: Any) -> AttentionCall:
        """Returns the call of the step on the layer's pages; `of_layer` are `scale`, `window` and `softcap`."""
        return AttentionCall(
            block_tables=self.batch.block_tables,
            kv_lens=self.batch.kv_lens,
            cu_q_lens=self.batch.cu_q_lens,
            tree_mask=self.tree_mask,
            page_offset=self.page_offset,
            plan=self.plan,
            q_len=self.q_len,
            mesh=self.mesh,
            implementation=self.implementation,
            **of_layer,
        )

    def run(
        self,
        run: PagedCall,
        plain: PlainCall,
        tokens: tuple[jax.Array, ...],
        shared: jax.Array | None,
        pages: Any,
        arrays: Any,
    ) -> tuple[jax.Array, Any]:
        """Returns `run(*tokens, shared, pages, arrays)`.

        In a step of whole rows the results have the derivative of `plain`, see `attend_whole_rows`.
        """
        if self.num_whole_rows is None:
            return run(*tokens, shared, pages, arrays)
        results: Any = attend_whole_rows(run, plain, self.num_whole_rows, tokens, shared, pages, arrays)
        return results[0], jax.lax.stop_gradient(results[1])
