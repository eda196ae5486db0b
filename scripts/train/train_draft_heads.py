"""Trains what drafts for a bundled model from its own states: Medusa heads, an EAGLE-style head, or an early exit.

Each learns the distribution that the frozen model has at the positions it drafts for, on the training files of
`train_tiny_model.py`: `OMP_NUM_THREADS=1 python scripts/train/train_draft_heads.py eagle`. Then it prints how often
each draft is the model's most probable token on held-out files, the tokens before it being those of the text.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.train.corpus import held_out_files, training_files
from scripts.train.draft_head_models import DRAFTERS
from scripts.train.train_tiny_model import ADAMW_BETAS, load_model, log, muon_step, tokenize

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM

    from scripts.train.draft_head_models import Eagle, Exit, Medusa, Tensors

    Drafter = Medusa | Eagle | Exit

WINDOW, BATCH_TOKENS = 256, 1024
# Positions of a batch that are learned from: their logits are what costs most.
LEARNED = 256
MUON_LR = 0.01
WARMUP_STEPS, LOG_STEPS = 20, 25
HELD_OUT_WINDOWS = 24


def examples(
    model: LlamaForCausalLM, drafter: Drafter, tensors: Tensors, windows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a drafter's states [K, T, D] of K drafts, and the model's [K, T, D] from which those tokens are drawn.

    That is for every position of windows i64[B, S + 1] whose answers are in its window.
    """
    import torch

    with torch.no_grad():
        output = model.model(input_ids=windows[:, :-1], use_cache=False, output_hidden_states=True)
        embedded = model.get_input_embeddings()(windows[:, 1:])
    last = output.last_hidden_state
    drafted = drafter.states(tensors, [*output.hidden_states[:-1], last], embedded)
    S = last.shape[1] - len(drafted)
    answers = [last[:, k : k + S].flatten(0, 1) for k in range(drafter.first, drafter.first + len(drafted))]
    return torch.stack([states[:, :S].flatten(0, 1) for states in drafted]), torch.stack(answers)


def train(model: LlamaForCausalLM, drafter: Drafter, stream: torch.Tensor, tokens: int, seed: int) -> Tensors:
    """Returns a drafter's tensors, learned from windows at random offsets of `stream` i64[tokens]."""
    import torch

    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: tensor.requires_grad_() for name, tensor in drafter.begin(model).items()}
    is_muon = {name: tensor.ndim == 2 and drafter.has_muon for name, tensor in tensors.items()}
    matrices = {name: torch.zeros_like(tensor) for name, tensor in tensors.items() if is_muon[name]}
    others = [tensor for name, tensor in tensors.items() if not is_muon[name]]
    adamw = torch.optim.AdamW(others, betas=ADAMW_BETAS, weight_decay=0.0)
    unembedding = model.lm_head.weight.detach()
    num_steps, began = -(-tokens // BATCH_TOKENS), time.monotonic()
    for step in range(num_steps):
        starts = torch.randint(len(stream) - WINDOW, (BATCH_TOKENS // WINDOW,), generator=generator)
        drafted, answers = examples(model, drafter, tensors, stream[starts[:, None] + torch.arange(WINDOW + 1)])
        chosen = torch.randperm(drafted.shape[1], generator=generator)[:LEARNED]
        wanted = torch.softmax(answers[:, chosen] @ unembedding.T, -1)
        loss = -(wanted * torch.log_softmax(drafted[:, chosen] @ unembedding.T, -1)).sum(-1).mean()
        loss.backward()
        scale = min((step + 1) / WARMUP_STEPS, 1 - step / num_steps)
        for name, momentum in matrices.items():
            muon_step(tensors[name], momentum, scale * MUON_LR)
        adamw.param_groups[0]["lr"] = scale * drafter.adamw_lr
        adamw.step()
        for tensor in tensors.values():
            tensor.grad = None
        if (step + 1) % LOG_STEPS == 0:
            speed = (step + 1) / (time.monotonic() - began)
            log(f"step {step + 1}/{num_steps} loss {loss.item():.4f} eta {(num_steps - step - 1) / speed:.0f} s")
    return {name: tensor.detach() for name, tensor in tensors.items()}


def agreement(
    model: LlamaForCausalLM, drafter: Drafter, tensors: Tensors, documents: list[torch.Tensor]
) -> list[float]:
    """Returns how often the most probable token of each draft is the model's, over windows of held-out documents."""
    import torch

    windows = [document[: WINDOW + 1] for document in documents if len(document) > WINDOW][:HELD_OUT_WINDOWS]
    unembedding = model.lm_head.weight.detach()
    with torch.no_grad():
        drafted, answers = examples(model, drafter, tensors, torch.stack(windows))
        is_right = (drafted @ unembedding.T).argmax(-1) == (answers @ unembedding.T).argmax(-1)
    return is_right.float().mean(-1).tolist()


def save(tensors: Tensors, folder: Path, description: dict) -> None:
    """Writes a drafter in bfloat16, as `jaxinfer.checkpoint.draft_heads` reads it."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "draft_heads.json").write_text(json.dumps(description, indent=2) + "\n")
    path = folder / "draft_heads.safetensors"
    save_file({name: t.to(torch.bfloat16).contiguous() for name, t in tensors.items()}, path)
    path.chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    assets = Path(__file__).resolve().parents[2] / "jaxinfer" / "assets"
    parser.add_argument("drafter", choices=DRAFTERS)
    parser.add_argument("--model", type=Path, default=assets / "tiny", help="checkpoint folder")
    parser.add_argument("--output", type=Path, help="folder of the drafter (default: beside the bundled models)")
    parser.add_argument("--num-drafts", type=int, default=4, help="drafts that heads learn to make")
    parser.add_argument("--num-layers", type=int, default=3, help="layers before the exit")
    parser.add_argument("--tokens", type=int, default=500_000, help="training tokens")
    parser.add_argument("--threads", type=int, default=1, help="more is faster and rounds differently")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import torch
    from tokenizers import Tokenizer

    torch.set_num_threads(arguments.threads)
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    model = load_model(arguments.model).eval()
    stream = torch.cat(tokenize(tokenizer, training_files(), arguments.seed))
    drafter = DRAFTERS[arguments.drafter](model, arguments.num_drafts, arguments.num_layers)
    tensors = train(model, drafter, stream, arguments.tokens, arguments.seed)
    description = {"drafter": arguments.drafter, "vocab_size": model.config.vocab_size, **drafter.description}
    save(drafter.finished(tensors), arguments.output or assets / f"tiny-{arguments.drafter}", description)
    rounded = {name: tensor.bfloat16().float() for name, tensor in tensors.items()}
    rates = agreement(model, drafter, rounded, tokenize(tokenizer, held_out_files()))
    print("held-out agreement by draft: " + ", ".join(f"{rate:.3f}" for rate in rates), flush=True)


if __name__ == "__main__":
    main()
