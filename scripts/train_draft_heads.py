"""Trains draft heads for a bundled model: Medusa heads, told the token that was drawn, on its last hidden states.

Head k of `jaxinfer.draft_heads` learns the distribution that the frozen model has k tokens after the next one, on the
training files of scripts/train_tiny_model.py. `OMP_NUM_THREADS=2 python scripts/train_draft_heads.py --threads 2` takes
about a quarter of an hour. It prints how often each head agrees with the model's most probable token on held-out files.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from corpus import held_out_files, training_files
from train_tiny_model import load_model, log, tokenize

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM

WINDOW, BATCH_TOKENS = 256, 1024
# Positions of a batch that the heads learn from: their logits are what costs most.
LEARNED = 512
LEARNING_RATE, BETAS = 5e-3, (0.9, 0.95)
WARMUP_STEPS, LOG_STEPS = 20, 25
HELD_OUT_WINDOWS = 24


def head_states(weights: torch.Tensor, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
    """Returns what each head unembeds, f32[K, T, D]: h + silu(W_k [h; e]) for weights [K, D, 2 D]."""
    import torch
    from torch.nn.functional import silu

    return hidden[None] + silu(torch.cat([hidden, embedded], -1)[None] @ weights.transpose(1, 2))


def examples(
    model: LlamaForCausalLM, windows: torch.Tensor, num_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns, for every position whose answers are in its window i64[B, S + 1], the model's state [T, D], the
    embedding of the token after it [T, D], and the states [K, T, D] from which the tokens after that are drawn.
    """
    import torch

    with torch.no_grad():
        hidden = model.model(input_ids=windows[:, :-1], use_cache=False).last_hidden_state
        embedded = model.get_input_embeddings()(windows[:, 1:])
    S = hidden.shape[1] - num_heads
    answers = torch.stack([hidden[:, k : k + S].flatten(0, 1) for k in range(1, num_heads + 1)])
    return hidden[:, :S].flatten(0, 1), embedded[:, :S].flatten(0, 1), answers


def train(model: LlamaForCausalLM, stream: torch.Tensor, num_heads: int, tokens: int, seed: int) -> torch.Tensor:
    """Returns the heads' weights f32[K, D, 2 D], learned from windows at random offsets of `stream` i64[tokens]."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    D = model.config.hidden_size
    weights = torch.zeros(num_heads, D, 2 * D, requires_grad=True)
    optimizer = torch.optim.AdamW([weights], betas=BETAS, weight_decay=0.0)
    unembedding = model.lm_head.weight.detach()
    num_steps, began = -(-tokens // BATCH_TOKENS), time.monotonic()
    for step in range(num_steps):
        starts = torch.randint(len(stream) - WINDOW, (BATCH_TOKENS // WINDOW,), generator=generator)
        hidden, embedded, answers = examples(model, stream[starts[:, None] + torch.arange(WINDOW + 1)], num_heads)
        chosen = torch.randperm(len(hidden), generator=generator)[:LEARNED]
        states = head_states(weights, hidden[chosen], embedded[chosen])
        wanted = torch.softmax(answers[:, chosen] @ unembedding.T, -1)
        loss = -(wanted * torch.log_softmax(states @ unembedding.T, -1)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min((step + 1) / WARMUP_STEPS, 1 - step / num_steps)
        optimizer.step()
        if (step + 1) % LOG_STEPS == 0:
            speed = (step + 1) / (time.monotonic() - began)
            log(f"step {step + 1}/{num_steps} loss {loss.item():.4f} eta {(num_steps - step - 1) / speed:.0f} s")
    return weights.detach()


def agreement(model: LlamaForCausalLM, weights: torch.Tensor, documents: list[torch.Tensor]) -> list[float]:
    """Returns how often each head's most probable token is the model's, over windows of held-out documents."""
    import torch

    windows = [document[: WINDOW + 1] for document in documents if len(document) > WINDOW][:HELD_OUT_WINDOWS]
    hidden, embedded, answers = examples(model, torch.stack(windows), len(weights))
    unembedding = model.lm_head.weight.detach()
    drafts = (head_states(weights, hidden, embedded) @ unembedding.T).argmax(-1)
    return (drafts == (answers @ unembedding.T).argmax(-1)).float().mean(-1).tolist()


def save(weights: torch.Tensor, folder: Path, vocab_size: int) -> None:
    """Writes the heads in bfloat16, as `jaxinfer.checkpoint.load_heads` reads them."""
    import torch
    from safetensors.torch import save_file

    num_heads, hidden_size, _ = weights.shape
    folder.mkdir(parents=True, exist_ok=True)
    config = {"drafter": "medusa", "num_heads": num_heads, "hidden_size": hidden_size, "vocab_size": vocab_size}
    (folder / "draft_heads.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file({"weights": weights.to(torch.bfloat16).contiguous()}, folder / "draft_heads.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    assets = Path(__file__).resolve().parents[1] / "jaxinfer" / "assets"
    parser.add_argument("--model", type=Path, default=assets / "tiny", help="checkpoint folder")
    parser.add_argument("--output", type=Path, default=assets / "tiny-medusa", help="folder of the heads")
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=150_000, help="training tokens")
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
    weights = train(model, stream, arguments.num_heads, arguments.tokens, arguments.seed)
    save(weights, arguments.output, model.config.vocab_size)
    rates = agreement(model, weights.to(torch.bfloat16).float(), tokenize(tokenizer, held_out_files()))
    print("held-out agreement by head: " + ", ".join(f"{rate:.3f}" for rate in rates), flush=True)


if __name__ == "__main__":
    main()
