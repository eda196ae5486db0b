"""Which drafter an engine speculates with, from what its user asked for."""

from __future__ import annotations

from pathlib import Path

from jaxinfer.checkpoint import load_checkpoint
from jaxinfer.checkpoint.draft_heads import has_draft_heads, load_draft_heads
from jaxinfer.config import EngineConfig
from jaxinfer.engine.buckets import max_verified_tokens, plan_buckets
from jaxinfer.engine.draft_model import DraftModel
from jaxinfer.engine.drafters import Drafter, make_drafter
from jaxinfer.engine.head_drafter import HeadDrafter
from jaxinfer.engine.speculation import Speculation
from jaxinfer.engine.step_costs import StepCosts


def plan_speculation(speculation: str | Path | Drafter | None, config: EngineConfig, dtype: str) -> Speculation | None:
    """Returns what adds drafts to the steps of an engine; ValueError for a drafter that does not exist."""
    if speculation is None:
        return None
    if config.decode_loop_steps > 1:
        raise ValueError(
            f"decode_loop_steps={config.decode_loop_steps} leaves no place for speculation={speculation!r}, which"
            " chooses drafts after every step; set EngineConfig.decode_loop_steps to 1 or leave out speculation"
        )
    if isinstance(speculation, Path) or (isinstance(speculation, str) and "/" in speculation):
        drafter = _load_drafter(speculation, dtype)
    else:
        drafter = make_drafter(speculation)
    buckets = plan_buckets(config, config.max_drafts)
    return Speculation(
        drafter,
        max_drafts=config.max_drafts,
        max_tokens=max_verified_tokens(config),
        costs=StepCosts(buckets) if config.adaptive_drafts else None,
    )


def _load_drafter(path: str | Path, dtype: str) -> Drafter:
    if has_draft_heads(path):
        return HeadDrafter(load_draft_heads(path, dtype))
    return DraftModel(*load_checkpoint(path, dtype))
