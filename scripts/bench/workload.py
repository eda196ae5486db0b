"""What `against_transformers.py` asks both sides to compute, and the random checkpoints it can ask it of."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

SECTIONS = ("prefill", "decode", "ttft", "tpot", "job", "prefix")
JOB_REQUESTS = 64
JOB_PROMPT_RANGE = (16, 512)
JOB_OUTPUT_RANGE = (16, 256)
PREFILL_BATCH, PREFILL_LEN = 4, 512
TTFT_LEN = 512
TPOT_PROMPT_LEN = TPOT_OUTPUT_LEN = 128
# Requests that share their first tokens and go on with a few of their own.
PREFIX_REQUESTS, PREFIX_LEN, PREFIX_OWN_LEN, PREFIX_OUTPUT_LEN = 64, 1000, 24, 16
# Steps of a measured decode that are not timed: the first ones touch new shapes and new memory.
WARM_STEPS = 3
LOWER, HIGHER = "lower", "higher"
RANDOM_SHAPES: dict[str, dict[str, Any]] = {
    "125m": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 32_000}
    | {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 2048},
    # About 100 M parameters each, half of them in the two tables of a vocabulary of 32,000.
    "experts": {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    | {"hidden_size": 512, "intermediate_size": 640, "num_hidden_layers": 8, "vocab_size": 32_000}
    | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 2048},
    "hybrid": {"model_type": "granitemoehybrid", "layer_types": [*["mamba"] * 5, "attention"] * 2}
    | {"hidden_size": 768, "shared_intermediate_size": 1536, "num_hidden_layers": 12, "vocab_size": 32_000}
    | {"num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 2048, "num_local_experts": 0}
    | {"mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_expand": 2},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 512, "query_pre_attn_scalar": 64}
    | {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 32_000}
    | {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 2048},
    # The sizes of Qwen3-0.6B, for a GPU.
    "qwen3-0.6b": {"model_type": "qwen3", "tie_word_embeddings": True, "vocab_size": 151_936}
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "max_position_embeddings": 4096}
    | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
}
# What both sides compute in, by device.
DTYPES = {"cpu": "float32", "gpu": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class Task:
    """One figure to measure: `batch` rows at `context` tokens, where the section has a choice."""

    section: str
    label: str
    better: str
    batch: int = 0
    context: int = 0


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Sizes that all tasks share; equal seeds give equal prompts."""

    vocab_size: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    sections: tuple[str, ...]
    steps: int  # timed decode steps
    repeats: int
    threads: int
    device: str = "cpu"
    seed: int = 0

    @property
    def dtype(self) -> str:
        return DTYPES[self.device]

    def prompts(self, count: int, length: int, purpose: str) -> list[list[int]]:
        """Draws token ids; a new purpose gives new prompts, so no prefix cache answers the second time."""
        draw = random.Random(f"{self.seed} {purpose}")
        return [draw.choices(range(1, self.vocab_size), k=length) for _ in range(count)]

    def job(self, purpose: str) -> list[tuple[list[int], int]]:
        """Draws (prompt, output length) pairs, lengths log-uniform and by the seed alone."""
        draw = random.Random(self.seed)
        sizes = [
            (log_uniform(draw, *JOB_PROMPT_RANGE), log_uniform(draw, *JOB_OUTPUT_RANGE)) for _ in range(JOB_REQUESTS)
        ]
        return [(self.prompts(1, n, f"{purpose} {i}")[0], output) for i, (n, output) in enumerate(sizes)]


def log_uniform(draw: random.Random, low: int, high: int) -> int:
    return round(math.exp(draw.uniform(math.log(low), math.log(high))))


def milliseconds(run: Callable[[int], Any], repeats: int) -> float:
    """Returns the median of `repeats` calls after one that is not counted; each call gets its own index."""
    times = []
    for index in range(repeats + 1):
        began = time.perf_counter()
        run(index)
        times.append(1e3 * (time.perf_counter() - began))
    return median(times[1:])


def table_rows(workload: Workload, static_batches: list[int]) -> dict[str, tuple[Task, list[Task]]]:
    """Returns by row of the table our task and the peer's tasks, of which the best counts."""
    prefill = f"prefill {PREFILL_BATCH} x {PREFILL_LEN}, tokens/s"
    tasks = {
        "prefill": [Task(section="prefill", label=prefill, better=HIGHER)],
        "decode": [
            Task(section="decode", label=f"decode batch {b} context {c}, ms", better=LOWER, batch=b, context=c)
            for c in workload.contexts
            for b in workload.batches
        ],
        "ttft": [Task(section="ttft", label=f"TTFT of {TTFT_LEN} tokens, ms", better=LOWER)],
        "tpot": [Task(section="tpot", label=f"TPOT over {TPOT_OUTPUT_LEN} tokens, ms", better=LOWER)],
    }
    rows = {task.label: (task, [task]) for section in workload.sections for task in tasks.get(section, [])}
    if "job" in workload.sections:
        ours = Task(section="job", label="job", better=HIGHER)
        continuous = Task(section="continuous", label="its continuous batching", better=HIGHER)
        static = [
            Task(section="job", label=f"generate() over static batches of {b}", better=HIGHER, batch=b)
            for b in static_batches
        ]
        rows[f"job of {JOB_REQUESTS}, output tokens/s"] = (ours, [*static, continuous])
    if "prefix" in workload.sections:
        # Ours alone, with and without: the peer does not share pages between requests.
        for section, name, better in (("ttft", "mean TTFT, ms", LOWER), ("rate", "output tokens/s", HIGHER)):
            for cache in ("cached", "computed"):
                label = f"prefix {cache}: {name}"
                rows[label] = (Task(section=f"prefix {section} {cache}", label=label, better=better), [])
    return rows


def write_random_checkpoint(folder: Path, shape: str, num_layers: int | None = None) -> None:
    """Saves a Llama with random float32 weights and a tokenizer that can spell every token id.

    `num_layers` None takes the shape's own number of layers.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    torch.manual_seed(0)
    fields = {"model_type": "llama", "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 0}
    layers = {} if num_layers is None else {"num_hidden_layers": num_layers}
    config = AutoConfig.for_model(**{**fields, **RANDOM_SHAPES[shape], **layers})
    model = AutoModelForCausalLM.from_config(config).float()
    model.generation_config = GenerationConfig(eos_token_id=0, pad_token_id=0)
    model.save_pretrained(folder)
    write_tokenizer(folder, config.vocab_size)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Saves a tokenizer that can spell every token id; id 0 ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<|endoftext|>", *alphabet, *(f"Ġword{i}" for i in range(vocab_size - len(alphabet) - 1))]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(words[:1])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}\n'
    (folder / "tokenizer_config.json").write_text(settings)


@contextlib.contextmanager
def checkpoint(folder: Path, random_shape: str | None, num_layers: int | None = None) -> Iterator[Path]:
    """Yields `folder`, or one with random weights of that shape, which is deleted afterwards."""
    if random_shape is None:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="random-model-") as scratch:
        # In a child, because the peak memory of a process counts from that of the one that started it.
        writer = multiprocessing.get_context("spawn").Process(
            target=write_random_checkpoint, args=(Path(scratch), random_shape, num_layers)
        )
        writer.start()
        writer.join()
        if writer.exitcode != 0:
            raise RuntimeError(f"writing a random checkpoint ended with exit code {writer.exitcode}")
        yield Path(scratch)
