"""Loads the drafter that the user has asked for, and the target model with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxinfer.checkpoint import Checkpoint, open_checkpoint
from jaxinfer.checkpoint.draft_heads import DraftHeads, has_draft_heads, load_draft_heads
from jaxinfer.checkpoint.draft_layers import MTP, is_eagle3, load_eagle3, load_mtp
from jaxinfer.config import EngineConfig
from jaxinfer.engine.drafters.draft_heads import HeadDrafter
from jaxinfer.engine.drafters.draft_model import DraftModel
from jaxinfer.engine.drafters.drafters import DRAFTERS, Drafter, NgramDrafter, make_drafter
from jaxinfer.engine.drafters.early_exit import ExitDrafter
from jaxinfer.engine.speculation.speculation import Speculation
from jaxinfer.engine.speculation.step_times import StepTimeTable
from jaxinfer.model.components.attention import AttentionParams
from jaxinfer.model.components.mlp import MLPParams
from jaxinfer.model.config import ModelConfig, uniform_decoder
from jaxinfer.model.params import LayerParams, Params
from jaxinfer.plan.step_shapes import loop_steps, max_mixed_tokens, plan_buckets
from jaxinfer.steps.eagle import EagleHead
from jaxinfer.steps.medusa import MedusaHeads, Paths
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.validation import shown

# They never make a tree.
CHAIN_DRAFTERS = (NgramDrafter, DraftModel, ExitDrafter)


def plan_speculation(
    speculation: str | Path | Drafter | None, config: EngineConfig, dtype: str, *, target: Checkpoint
) -> Speculation | None:
    """Returns the speculation of an engine for the checkpoint `target`, None without a drafter.

    Raises ValueError for a drafter that does not exist or was made for another target.
    """
    if speculation is None:
        if config.draft_trees:
            raise ValueError("draft_trees=True has no drafter to make them: give LLM a speculation, or leave it out")
        return None
    if loop_steps(config) > 1:
        raise ValueError(
            f"decode_loop_steps={config.decode_loop_steps} leaves no place for speculation={shown(speculation)}, which"
            " chooses drafts after every step; set EngineConfig.decode_loop_steps to 1 or leave out speculation"
        )
    if not target.config.has_logits:
        raise ValueError(
            f"speculation={shown(speculation)} drafts tokens, and the checkpoint {target.path} is an embedding model,"
            " which samples none; leave out speculation"
        )
    if isinstance(speculation, Path) or (isinstance(speculation, str) and _is_place(speculation)):
        drafter = _load_drafter(speculation, dtype, target)
    elif isinstance(speculation, str) and speculation == MTP:
        drafter = HeadDrafter(load_mtp(target, dtype, config.quantization))
    else:
        drafter = make_drafter(speculation)
    if config.draft_trees and isinstance(drafter, CHAIN_DRAFTERS):
        raise ValueError(
            f"draft_trees=True is not for speculation={shown(speculation)}, which drafts one token after another; leave"
            " out EngineConfig.draft_trees, or give the folder of Medusa or EAGLE-style heads"
        )
    buckets = plan_buckets(config, config.max_drafts)
    return Speculation(
        drafter,
        max_drafts=config.max_drafts,
        max_tokens=max_mixed_tokens(config),
        times=StepTimeTable(buckets) if config.adaptive_drafts else None,
    )


def load_target(
    checkpoint: Checkpoint,
    config: EngineConfig,
    dtype: str,
    planned: Speculation | None,
    *,
    mesh: Mesh | None = None,
    show_progress: bool,
) -> tuple[Params, ModelConfig]:
    """Loads the target model, its layers in groups that suit the drafter, if any."""
    layer_cuts = () if planned is None else planned.layer_cuts
    loading = {"quantization": config.quantization, "mesh": mesh, "show_progress": show_progress}
    return checkpoint.load(dtype, layer_cuts=layer_cuts, **loading)


def _is_place(speculation: str) -> bool:
    """True for a folder, file or Hub id, False for the name of a drafter."""
    return speculation not in (*DRAFTERS, MTP) and ("/" in speculation or Path(speculation).exists())


def _load_drafter(path: str | Path, dtype: str, target: Checkpoint) -> Drafter:
    if has_draft_heads(path):
        return drafter_of(load_draft_heads(path, dtype))
    draft = open_checkpoint(path)
    if is_eagle3(draft):
        return HeadDrafter(load_eagle3(draft, dtype, target))
    _require_same_tokens(draft.path, target.path)
    return DraftModel(*draft.load(dtype))


def _require_same_tokens(draft: Path, target: Path) -> None:
    """Raises ValueError if two checkpoints have tokenizers with other ordinary tokens, or the same under other ids."""
    tokenizers = [Tokenizer.from_path(folder) for folder in (draft, target)]
    ours, theirs = ({} if tokenizer is None else tokenizer.ordinary_tokens for tokenizer in tokenizers)
    if None in tokenizers or ours == theirs:
        return
    _, token = min((id_, token) for token, id_ in ours.items() ^ theirs.items())
    raise ValueError(
        f"the draft model {draft} has another tokenizer than the target: the id of {shown(token)} is {ours.get(token)}"
        f" there, and {theirs.get(token)} in the target; speculation needs a draft model of the target's vocabulary"
    )


def drafter_of(heads: DraftHeads, tree: Paths = ()) -> Drafter:
    """Returns the drafter with these heads; `tree` replaces their own tree."""
    if heads.kind == "exit":
        return ExitDrafter(heads.numbers["num_layers"], heads.tensors["norm"], heads.tensors["lens"])
    return HeadDrafter(MedusaHeads(heads.tensors["weights"]) if heads.kind == "medusa" else _eagle_head(heads), tree)


def _eagle_head(heads: DraftHeads) -> EagleHead:
    numbers, layer = dict(heads.numbers), dict(heads.tensors)
    own: dict[str, Any] = {name: layer.pop(name) for name in ("embedding_norm", "hidden_norm", "input", "final_norm")}
    window = int(numbers.pop("window"))
    config = uniform_decoder(num_layers=1, max_position=2 * window, **numbers)
    o = layer["o"].reshape(layer["o"].shape[0], -1)
    attention = AttentionParams(**{name: layer[name] for name in "qkv"}, o=o)
    mlp = MLPParams(gate=layer["gate"], up=layer["up"], down=layer["down"])
    norms: dict[str, Any] = {"mixer_norm": layer["attention_norm"], "feed_forward_norm": layer["mlp_norm"]}
    return EagleHead(layer=LayerParams(attention, mlp, **norms), config=config, window=window, **own)
