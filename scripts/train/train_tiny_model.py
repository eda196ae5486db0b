"""Trains the two bundled Llama models, a target and its draft, on the source of the standard library.

Run it as `OMP_NUM_THREADS=1 python scripts/train/train_tiny_model.py`, about an hour on one quiet core; `--continue`
trains on what is there. docs/performance.md lists the runs that made the bundled models.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import sys
import tempfile
import time
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from scripts.train.corpus import held_out_files, training_files

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM

END_OF_TEXT, END_ID = "<|endoftext|>", 0
VOCAB_SIZE = 4096
# The split of Llama 3 without English contractions: a run of spaces before a word is one piece, so that
# indentation compresses, and a line end stays with the punctuation before it.
SPLIT_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

DRAFT_SHAPE = {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 384, "head_dim": 32}
DRAFT_SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2}
TARGET_SHAPE = {"hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 704, "head_dim": 32}
TARGET_SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 4}
SHORT_WINDOW, MAX_CONTEXT = 512, 2048
LONG_SHARE = 0.15  # of the tokens, the last, in windows of MAX_CONTEXT, so that every position is trained
BATCH_TOKENS = 2048
MEAN_PIECE = 80  # characters
AFTER_SPACE = re.compile(r"\w (?=\S)")
STATEMENT = re.compile(r"^ *(?:async |def |class |import |from |for |if |with |@)", re.MULTILINE)
DOCUMENT_SHARE = 0.1  # of the statements begin a document
MUON_LR, MUON_MOMENTUM, MUON_WEIGHT_DECAY = 0.02, 0.95, 0.05
ADAMW_LR, ADAMW_BETAS = 0.008, (0.9, 0.95)
DECAY_SHARES = {"tiny-draft": 1.0, "tiny": 0.5}  # the last part of the steps, decaying linearly to zero
WARMUP_STEPS, LOG_STEPS = 30, 25

log = partial(print, file=sys.stderr, flush=True)


def train_tokenizer(files: list[Path]) -> Tokenizer:
    """Learns a byte-level BPE; END_OF_TEXT is token END_ID, stands between documents and begins every prompt."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, END_ID)]
    )
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=[END_OF_TEXT], show_progress=False)
    trainer.initial_alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator((path.read_text(encoding="utf-8") for path in files), trainer)
    return tokenizer


def tokenize(tokenizer: Tokenizer, files: list[Path], seed: int | None = None) -> list[torch.Tensor]:
    """Returns per document i64[1 + tokens], led by END_ID; without a seed, a document is a file."""
    import torch

    rng, documents = random.Random(seed), []
    for path in files:
        text = path.read_text(encoding="utf-8")
        for pieces in [[text]] if seed is None else cut(text, rng):
            encoded = (tokenizer.encode(piece, add_special_tokens=False).ids for piece in pieces)
            documents.append(torch.tensor([END_ID, *chain.from_iterable(encoded)]))
    return documents


def cut(text: str, rng: random.Random) -> list[list[str]]:
    """Cuts a file into documents that begin with a statement, and each into pieces that are encoded one by one.

    Prompts are like that: they begin anywhere and end anywhere, often after a space. Else the model would never see
    what follows `def ` where nothing stands before it and the space is a token of its own.
    """
    starts = [match.start() for match in STATEMENT.finditer(text) if rng.random() < DOCUMENT_SHARE]
    documents = []
    for begin, end in pairwise([0, *starts, len(text)]):
        pieces, start = [], begin
        while start < end:
            stop = start + 1 + int(rng.expovariate(1 / MEAN_PIECE))
            space = AFTER_SPACE.search(text, start if start == begin else stop)
            if space and rng.random() < 0.5:
                stop = space.end()
            pieces.append(text[start : min(stop, end)])
            start = stop
        documents.append(pieces)
    return [pieces for pieces in documents if pieces]


def build_model(shape: dict[str, Any]) -> LlamaForCausalLM:
    """Builds a randomly initialised Llama in float32."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **shape,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=END_ID,
        eos_token_id=END_ID,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=END_ID, pad_token_id=END_ID)
    return model


def load_model(folder: Path) -> LlamaForCausalLM:
    """Loads a model that `save` has written, in float32."""
    import torch
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def muon_step(matrix: torch.Tensor, momentum: torch.Tensor, learning_rate: float) -> None:
    """Moves `matrix` by its orthogonalised momentum (Muon, Jordan et al. 2024).

    torch.optim.Muon orthogonalises in bfloat16, which many processors emulate at a tenth of the speed.
    """
    assert matrix.grad is not None
    momentum.lerp_(matrix.grad, 1 - MUON_MOMENTUM)
    update = orthogonalize(matrix.grad.lerp(momentum, MUON_MOMENTUM))
    rows, columns = matrix.shape
    matrix.data.mul_(1 - learning_rate * MUON_WEIGHT_DECAY)
    matrix.data.sub_(update, alpha=learning_rate * math.sqrt(max(1.0, rows / columns)))


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Brings all singular values near one by Newton-Schulz steps; the coefficients are Muon's."""
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonalize(matrix.T).T
    matrix = matrix / (matrix.norm() + 1e-7)
    for _ in range(5):
        gram = matrix @ matrix.T
        matrix = 3.4445 * matrix + (2.0315 * gram @ gram - 4.7750 * gram) @ matrix
    return matrix


def next_token_loss(model: LlamaForCausalLM, windows: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Cross entropy in nats of windows i64[B, S + 1]."""
    from torch.nn.functional import cross_entropy

    logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten(), reduction=reduction)


def train(
    model: LlamaForCausalLM, stream: torch.Tensor, tokens: int, decay_share: float, *, rate: float, seed: int
) -> None:
    """Trains in place on windows at random offsets of `stream` i64[tokens]; `rate` multiplies the learning rates."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or "embed" in name]
    momenta = [torch.zeros_like(matrix) for matrix in matrices]
    adamw = torch.optim.AdamW(others, betas=ADAMW_BETAS, weight_decay=0.0)
    num_steps = math.ceil(tokens / BATCH_TOKENS)
    began, losses = time.monotonic(), []
    for step in range(num_steps):
        window = SHORT_WINDOW if step < (1 - LONG_SHARE) * num_steps else MAX_CONTEXT
        starts = torch.randint(len(stream) - window, (BATCH_TOKENS // window,), generator=generator)
        loss = next_token_loss(model, stream[starts[:, None] + torch.arange(window + 1)])
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        decay = (num_steps - step) / (decay_share * max(1, num_steps - WARMUP_STEPS))
        scale = rate * min((step + 1) / WARMUP_STEPS, decay, 1.0)
        for matrix, momentum in zip(matrices, momenta, strict=True):
            muon_step(matrix, momentum, scale * MUON_LR)
        adamw.param_groups[0]["lr"] = scale * ADAMW_LR
        adamw.step()
        losses.append(loss.item())
        if (step + 1) % LOG_STEPS == 0 or step + 1 == num_steps:
            speed = (step + 1) / (time.monotonic() - began)
            recent = f"step {step + 1}/{num_steps} loss {fmean(losses[-LOG_STEPS:]):.4f}"
            log(f"{recent} {speed * BATCH_TOKENS:.0f} tokens/s eta {(num_steps - step - 1) / speed:.0f} s")


def bits_per_byte(model: LlamaForCausalLM, documents: list[torch.Tensor], num_bytes: int) -> float:
    """Cost of documents i64[1 + tokens], each cut into windows that share one token with the one before."""
    import torch

    starts = [(document, i) for document in documents for i in range(0, len(document) - 1, MAX_CONTEXT)]
    windows = [document[None, i : i + MAX_CONTEXT + 1] for document, i in starts]
    with torch.inference_mode():
        nats = sum(next_token_loss(model, window, reduction="sum").item() for window in windows)
    return nats / math.log(2) / num_bytes


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes a Hugging Face folder beside `folder`, then puts it in its place by renaming."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    config |= {"model_max_length": MAX_CONTEXT, "clean_up_tokenization_spaces": False}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".saving-") as scratch:
        fresh = Path(scratch, "fresh")
        model.save_pretrained(fresh)
        tokenizer.save(str(fresh / "tokenizer.json"))
        (fresh / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
        (fresh / "model.safetensors").chmod(0o644)
        if folder.exists():
            folder.rename(Path(scratch, "old"))
        fresh.rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    assets = Path(__file__).resolve().parents[2] / "jaxinfer" / "assets"
    parser.add_argument("--output", type=Path, default=assets, help="folder of the model folders")
    parser.add_argument("--tokens", type=int, default=2_400_000, help="training tokens of the target, 0 to leave it")
    parser.add_argument(
        "--draft-tokens", type=int, default=2_600_000, help="training tokens of the draft, 0 to leave it"
    )
    parser.add_argument("--continue", dest="is_continued", action="store_true", help="train on what is in --output")
    parser.add_argument("--threads", type=int, default=1, help="more is faster and rounds differently")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=1.0, help="multiplies the learning rates")
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import torch

    torch.set_num_threads(arguments.threads)
    training, held_out = training_files(), held_out_files()
    held_out_bytes = sum(path.stat().st_size for path in held_out)
    tokenizer = train_tokenizer(training)
    stream = torch.cat(tokenize(tokenizer, training, arguments.seed))
    documents = tokenize(tokenizer, held_out)
    log(f"{len(training)} files, {len(stream)} tokens; held out {len(held_out)}, {held_out_bytes} bytes")
    plans = {"tiny-draft": (DRAFT_SHAPE, arguments.draft_tokens), "tiny": (TARGET_SHAPE, arguments.tokens)}
    for name, (shape, num_tokens) in plans.items():
        if num_tokens == 0:
            continue
        torch.manual_seed(arguments.seed)
        model = load_model(arguments.output / name) if arguments.is_continued else build_model(shape)
        train(model, stream, num_tokens, DECAY_SHARES[name], rate=arguments.rate, seed=arguments.seed)
        save(model.bfloat16(), tokenizer, arguments.output / name)
        # The stored weights in float32 arithmetic: bfloat16 matmuls are emulated on most processors.
        bits = bits_per_byte(model.float(), documents, held_out_bytes)
        print(f"{name}: {model.num_parameters()} parameters, {bits:.4f} held-out bits per byte", flush=True)


if __name__ == "__main__":
    main()
