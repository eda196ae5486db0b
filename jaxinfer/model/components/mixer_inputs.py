"""What layers get beside the states of tokens: the context of the step, and a mixer's place in it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
from flax import struct
from jax.sharding import Mesh

from jaxinfer.model.batch import Batch, StepTokens
from jaxinfer.model.components.recurrent.states import StateSlots
from jaxinfer.model.components.rope import Rope, rotary_angles
from kernels_pallas.paged_attention.call import AttentionCall
from kernels_pallas.whole_rows import PagedCall, PlainCall, attend_whole_rows

Angles = tuple[jax.Array, jax.Array]  # cosine and sine f32[T, 1, R/2]


@struct.dataclass
class StepContext:
    """What all layers of a step share. `step_context` makes it, once per step."""

    batch: Batch
    angles: tuple[Angles, ...] = ()  # of the tokens, for each of `ropes`
    tree_mask: Any = None  # as in `AttentionCall`
    slots: StateSlots | None = None  # if the model has a recurrent mixer
    ropes: tuple[Rope, ...] = struct.field(pytree_node=False, default=())
    q_len: int | None = struct.field(pytree_node=False, default=None)  # as in `AttentionCall`, and so the next two
    implementation: str | None = struct.field(pytree_node=False, default=None)
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)
    num_whole_rows: int | None = struct.field(pytree_node=False, default=None)  # see `step_context`
    parts: Any = None  # the `Parts` of the step, if stages share layers

    def for_mixers(self, mixers: Iterable[Any]) -> StepContext:
        """Returns the context with the angles of these mixers alone."""
        ropes = ropes_of(mixers)
        return replace(self, ropes=ropes, angles=tuple(self.angles_of(rope) for rope in ropes))

    def angles_of(self, rope: Rope) -> Angles:
        """Returns the angles of the tokens for one of `ropes`."""
        return self.angles[self.ropes.index(rope)]


def ropes_of(mixers: Iterable[Any]) -> tuple[Rope, ...]:
    """Returns each rotary embedding of some mixers once."""
    return tuple(dict.fromkeys(mixer.rope for mixer in mixers if mixer.rope is not None))


def with_angles(context: StepContext, mixers: Iterable[Any]) -> StepContext:
    """Returns the context with the angles of its tokens for some mixers."""
    ropes = ropes_of(mixers)
    return replace(context, ropes=ropes, angles=tuple(rotary_angles(context.batch.positions, rope) for rope in ropes))


@dataclass(frozen=True)
class MixerInputs:
    """The inputs of any mixer beside hidden states and its pages: the step, and where its pages are."""

    step: StepContext
    tokens: StepTokens
    kind: int = 0  # of its pages
    page_offset: jax.Array | int = 0  # the index of the layer's first page in its pool
    is_shared: bool = False  # other layers write or read the pages too
    plan: Any = None  # of the step, for this mixer's kernel, see `plan_attention`
    opened: MixerInputs | None = None  # those for its open pages, if it has any
    num_exact: int = 0  # of open pages, as in `PageKind`

    def call(self, *, scale: float, window: int | None = None, softcap: float | None = None) -> AttentionCall:
        """Returns the call of the step on the layer's pages; the arguments are as in `AttentionCall`."""
        step, batch = self.step, self.step.batch
        return AttentionCall(
            block_tables=batch.tables_of(self.kind),
            kv_lens=batch.kv_lens,
            cu_q_lens=batch.cu_q_lens,
            tree_mask=step.tree_mask,
            page_offset=self.page_offset,
            plan=self.plan,
            q_len=step.q_len,
            mesh=step.mesh,
            implementation=step.implementation,
            scale=scale,
            window=window,
            softcap=softcap,
        )

    def run(
        self,
        compute: PagedCall,
        plain: PlainCall,
        tokens: tuple[jax.Array, ...],
        shared: jax.Array | None,
        pages: Any,
        arrays: Any,
    ) -> tuple[jax.Array, Any]:
        """Returns `compute(*tokens, shared, pages, arrays)`; `arrays` are integers of the step, as those of a call.

        In a step of whole rows the results have the derivative of `plain`, see `attend_whole_rows`.
        """
        if self.step.num_whole_rows is None:
            return compute(*tokens, shared, pages, arrays)
        results: Any = attend_whole_rows(compute, plain, self.step.num_whole_rows, tokens, shared, pages, arrays)
        return results[0], jax.lax.stop_gradient(results[1])
