"""Measures speculation against plain decoding and against transformers, all in one run on one CPU, in float32.

Texts are files of this repository, which the bundled models were not trained on. "continue": greedy continuations.
"edit": the output is a file of the prompt with one edit; a logits processor imposes it, for small models do not follow
instructions.

A figure is output tokens per second of the steps in which all requests decode, drafting and host work included; of
rounds the median counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxinfer.checkpoint import read_config
from jaxinfer.text.tokenizer import Tokenizer
from scripts.bench.against_transformers import BUNDLED_MODEL, confine, integers, print_figures, some_of
from scripts.bench.drafting_engine import MAX_DRAFTS, OUTPUT_LEN, PROMPT_LEN, DraftingEngine
from scripts.bench.workload import RANDOM_SHAPES, checkpoint

FILES = sorted(BUNDLED_MODEL.parents[1].rglob("*.py"))
SCRIPT_BIAS = 1e4
TEXTS = ("continue", "edit")


class Texts:
    """Prompts by workload and batch size, and the edited outputs, as token ids."""

    def __init__(self, encode: Callable[[str], list[int]], vocab_size: int) -> None:
        self._files = [encode(path.read_text(encoding="utf-8")) for path in FILES]
        self._files = [tokens for tokens in self._files if len(tokens) > PROMPT_LEN + 8]
        self._vocab_size = vocab_size

    def prompts(self, batch: int) -> list[list[int]]:
        chosen = (self._files[i % len(self._files)] for i in range(batch))
        return [[1 + i, *tokens[i : i + PROMPT_LEN - 1]] for i, tokens in enumerate(chosen)]

    def scripts(self, batch: int) -> np.ndarray:
        """What follows each prompt in "edit": its own beginning with one token replaced, i32[batch, OUTPUT_LEN]."""
        scripts = np.array([prompt[:OUTPUT_LEN] for prompt in self.prompts(batch)], np.int32)
        scripts[:, OUTPUT_LEN // 2] = (scripts[:, OUTPUT_LEN // 2] + 7) % self._vocab_size
        return scripts


def processor_of(scripts: np.ndarray) -> Callable[..., Any]:
    """Returns the logits processor that imposes row `argument` of the scripts after a prompt."""

    def impose(logits, tokens, length, argument):
        token = jnp.asarray(scripts)[argument.astype(jnp.int32), length - PROMPT_LEN]
        return logits.at[token].add(SCRIPT_BIAS)

    return impose


class Peer:
    """transformers on the same checkpoint."""

    def __init__(self, model: Path, assistant: Path | None, threads: int) -> None:
        import torch
        import transformers

        self._torch, self._transformers = torch, transformers
        torch.set_num_threads(threads)
        self._model = self._load(model)
        self._assistant = None if assistant is None else self._load(assistant)

    def _load(self, path: Path) -> Any:
        self._transformers.logging.set_verbosity_error()
        load = self._transformers.AutoModelForCausalLM.from_pretrained
        model = load(path, dtype=self._torch.float32, attn_implementation="sdpa").eval()
        model.config.eos_token_id = model.generation_config.eos_token_id = None
        return model

    def kinds(self, batch: int) -> dict[str, dict[str, Any]]:
        kinds: dict[str, dict[str, Any]] = {"plain": {}}
        if batch == 1:  # neither of the two knows batches
            kinds["prompt lookup"] = {"prompt_lookup_num_tokens": MAX_DRAFTS}
            if self._assistant is not None:
                kinds["assisted"] = {"assistant_model": self._assistant}
        return kinds

    def run(self, prompts: list[list[int]], scripts: np.ndarray | None, **options: Any) -> float:
        """Returns tokens per second after the first token."""
        torch = self._torch

        def impose(tokens: Any, logits: Any) -> Any:
            column = min(tokens.shape[1] - PROMPT_LEN, OUTPUT_LEN - 1)  # the last is asked for a token too many
            place = torch.from_numpy(scripts)[: len(tokens), column].long()
            return logits.scatter_add(1, place[:, None], torch.full((len(tokens), 1), SCRIPT_BIAS))

        if scripts is not None:
            options["logits_processor"] = self._transformers.LogitsProcessorList([impose])
        tokens = torch.tensor(prompts)
        options |= {"attention_mask": torch.ones_like(tokens), "do_sample": False, "pad_token_id": 0}
        seconds = []
        for count in (1, OUTPUT_LEN):
            began = time.perf_counter()
            with torch.inference_mode():
                output = self._model.generate(tokens, max_new_tokens=count, **options)
            seconds.append(time.perf_counter() - began)
            assert output.shape[1] == PROMPT_LEN + count
        return len(prompts) * (OUTPUT_LEN - 1) / (seconds[1] - seconds[0])


def measure(model: Path, batch: int, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Returns the figures of all rounds by label."""
    tokenizer = Tokenizer.from_path(model)
    assert tokenizer is not None
    texts = Texts(tokenizer.encode, read_config(model).vocab_size)
    prompts, scripts = texts.prompts(batch), texts.scripts(batch)
    drafters: dict[str, Any] = {name: name for name in arguments.drafters}
    if arguments.draft_model is not None:
        drafters["draft model"] = arguments.draft_model
    processors = {"script": processor_of(scripts)}
    engines = {name: DraftingEngine(model, batch, drafters[name], processors=processors) for name in drafters}
    figures: dict[str, list[float]] = {}

    def note(label: str, value: float) -> None:
        figures.setdefault(label, []).append(value)
        print(f"{label}: {value:.2f}", flush=True)

    for index in range(arguments.rounds):
        for name, engine in engines.items():
            for text in arguments.texts:
                params = {"logits_processors": ("script",)} if text == "edit" else {}
                options: dict[str, Any] = {"salt": f"{index} {text}", **params}
                run, plain = engine.run_beside_plain(prompts, **options)
                note(f"batch {batch}, {text}: plain before and after {name}, tokens/s", plain)
                note(f"batch {batch}, {text}: {name}, tokens/s", run.tokens_per_second)
                note(f"batch {batch}, {text}: {name}, against plain", run.tokens_per_second / plain)
                note(f"batch {batch}, {text}: {name}, tokens per row and step", run.tokens_per_step)
    if arguments.peer:
        peer = Peer(model, arguments.draft_model, arguments.threads)
        for _ in range(arguments.rounds):
            for kind, options in peer.kinds(batch).items():
                for text in arguments.texts:
                    rate = peer.run(prompts, scripts if text == "edit" else None, **options)
                    note(f"batch {batch}, {text}: transformers {kind}, tokens/s", rate)
    return figures


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, default=BUNDLED_MODEL, help="checkpoint folder")
    model.add_argument("--random-shape", choices=RANDOM_SHAPES, help="size of a random checkpoint")
    parser.add_argument("--draft-model", type=Path, help="checkpoint folder of a draft model of the same vocabulary")
    parser.add_argument("--drafters", type=some_of("ngram", "suffix"), default=("ngram", "suffix"), help="by comma")
    parser.add_argument("--texts", type=some_of(*TEXTS), default=TEXTS, help="in turn, by comma")
    parser.add_argument("--batches", type=integers, default=(1, 32), help="requests at a time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="cores")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="leave out transformers")
    parser.add_argument("--spin", action="store_true", help="do not stop torch's threads from spinning")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    confine(arguments)
    with checkpoint(arguments.model, arguments.random_shape) as folder:
        figures = {}
        for batch in arguments.batches:
            figures |= measure(folder, batch, arguments)
    print_figures(figures, arguments)


if __name__ == "__main__":
    main()
