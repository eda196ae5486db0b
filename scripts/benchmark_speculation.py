"""Measures speculation against plain decoding and against transformers, all in one run on one CPU, in float32.

Texts are files of this repository, which the bundled models were not trained on. "continue": greedy continuations.
"edit": the output is a file of the prompt with one edit; a logits processor imposes it, for small models do not follow
instructions. "scripted": a drafter that is right with a given probability, told the continuations beforehand, and the
bound of Leviathan et al. (2023) for that probability, from the times of steps that verify all drafts they are given.

A figure is output tokens per second of the steps in which all requests decode, drafting and host work included; of
rounds, which alternate, the median counts.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from benchmark import BUNDLED_MODEL, confine, integers, print_figures, some_of
from benchmark_workload import RANDOM_SHAPES, checkpoint

from jaxinfer import LLM, EngineConfig, SamplingParams
from jaxinfer.checkpoint import read_config
from jaxinfer.engine.request import Completion, Request
from jaxinfer.engine.step import Step
from jaxinfer.tokenizer import Tokenizer

FILES = sorted((BUNDLED_MODEL.parents[1]).glob("*.py"))
PROMPT_LEN, OUTPUT_LEN = 192, 128
# What a scripted drafter is right with.
RATES = (0.0, 0.3, 0.5, 0.7, 0.9)
SCRIPT_BIAS = 1e4
MAX_DRAFTS = EngineConfig.max_drafts


class ScriptedDrafter:
    """Right about each token of what it was told with probability `rate`, wrong otherwise."""

    def __init__(self) -> None:
        self.rate, self.most = 0.0, MAX_DRAFTS
        self._answers: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._random = random.Random(0)

    def learn(self, completions: Iterable[Completion]) -> None:
        self._answers |= {c.prompt_token_ids: c.token_ids for c in completions}

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        return [self._draft(*pair) for pair in zip(requests, counts, strict=True)]

    def forget(self, request: Request) -> None:
        pass

    def _draft(self, request: Request, count: int) -> list[int]:
        answer = self._answers.get(tuple(request.token_ids[: request.num_prompt_tokens]), ())
        start = request.num_output_tokens
        tokens = answer[start : start + min(count, self.most)]
        return [token if self._random.random() < self.rate else token ^ 1 for token in tokens]


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


class Engine:
    """One of our engines, and what its decoding steps took."""

    def __init__(
        self, model: Path, batch: int, speculation: Any, scripts: np.ndarray | None = None, **limits: Any
    ) -> None:
        config = EngineConfig(max_num_seqs=batch, max_model_len=PROMPT_LEN + OUTPUT_LEN, **limits)
        processors = {} if scripts is None else {"script": processor_of(scripts)}
        self.llm = LLM(model, config=config, dtype="float32", logits_processors=processors, speculation=speculation)
        self.llm.warm_up()
        self.llm.on_step = self._enter
        self._seconds, self._num_steps = 0.0, 0
        self.plain_seconds: list[float] = []  # of the last run's steps that were launched ahead, so without drafts

    def _enter(self, step: Step, seconds: float) -> None:
        if step.is_decode or step.is_verify:
            self._seconds += seconds
            self._num_steps += len(step.chunks)
        if step.is_decode and step.is_ahead:
            self.plain_seconds.append(seconds)

    def run_plain(self, prompts: list[list[int]], *, salt: str, temperature: float = 0.0) -> float:
        """Returns tokens per second without drafts: of the same engine, for two of a kind differ by up to 6 %."""
        scheduler = self.llm._scheduler
        scheduler._speculation, speculation = None, scheduler._speculation
        rate, _, _ = self.run(prompts, salt=salt, temperature=temperature)
        scheduler._speculation = speculation
        return rate

    def run(
        self, prompts: list[list[int]], *, salt: str, is_edit: bool = False, temperature: float = 0.0
    ) -> tuple[float, float, list[Completion]]:
        """Returns tokens per second and tokens per row and step, of steps in which all decode, and what came out."""
        base: dict[str, Any] = {
            "max_tokens": OUTPUT_LEN,
            "temperature": temperature,
            "seed": 0,
            "ignore_eos": True,
        }
        params = [
            SamplingParams(**base, logits_processors={"script": i} if is_edit else {}) for i in range(len(prompts))
        ]
        self._seconds, self._num_steps = 0.0, 0
        self.plain_seconds.clear()
        before = self.llm.metrics()
        completions = self.llm.generate(prompts, params, show_progress=False, cache_salt=salt)
        num_accepted = self.llm.metrics().num_accepted_tokens - before.num_accepted_tokens
        num_tokens = self._num_steps + num_accepted
        return num_tokens / self._seconds, num_tokens / self._num_steps, completions


def step_seconds(engine: Engine, drafter: ScriptedDrafter, prompts: list[list[int]], salt: str) -> list[float]:
    """Returns what a step takes that verifies 1, 2, … drafts of each request, whoever made them."""
    seconds = []
    for drafter.most in range(1, MAX_DRAFTS + 1):
        rate, per_step, _ = engine.run(prompts, salt=salt)
        seconds.append(len(prompts) * per_step / rate)
    return seconds


def bound(plain: float, seconds: Sequence[float], batch: int, rate: float) -> float:
    """The most tokens per second for any number of drafts a row, drafted in no time (Leviathan et al. 2023)."""
    drafted = [batch * sum(rate**i for i in range(k + 1)) / seconds[k - 1] for k in range(1, len(seconds) + 1)]
    return max(plain, *drafted)


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
    scripted = ScriptedDrafter()
    drafters: dict[str, Any] = {name: name for name in arguments.drafters if name != "none"}
    if arguments.draft_model is not None:
        drafters["draft model"] = arguments.draft_model
    engines = {name: Engine(model, batch, drafters[name], scripts) for name in drafters}
    engines["plain"] = Engine(model, batch, None, scripts)
    oracle = Engine(model, batch, scripted, scripts)
    obedient = ScriptedDrafter()  # of which everything is verified
    verifying = Engine(model, batch, obedient, scripts, adaptive_drafts=False)
    for drafter in (scripted, obedient):
        drafter.learn(engines["plain"].run(prompts, salt="first")[2])
    figures: dict[str, list[float]] = {}

    def note(label: str, value: float) -> None:
        figures.setdefault(label, []).append(value)
        print(f"{label}: {value:.2f}", flush=True)

    for index in range(arguments.rounds):
        for name, engine in engines.items():
            for text in ("continue", "edit"):
                rate, per_step, _ = engine.run(prompts, is_edit=text == "edit", salt=f"{index} {text}")
                note(f"batch {batch}, {text}: {name}, tokens/s", rate)
                note(f"batch {batch}, {text}: {name}, tokens per row and step", per_step)
        seconds = step_seconds(verifying, obedient, prompts, f"{index}")
        after = oracle.run_plain(prompts, salt=f"{index}")
        for acceptance in RATES:
            scripted.rate = acceptance
            rate, _, _ = oracle.run(prompts, salt=f"{index}")
            before, after = after, oracle.run_plain(prompts, salt=f"{index}")
            plain = (before + after) / 2
            note(f"batch {batch}, scripted {acceptance}, tokens/s", rate)
            note(f"batch {batch}, scripted {acceptance}, against plain before and after", rate / plain)
            most = bound(plain, seconds, batch, acceptance)
            note(f"batch {batch}, scripted {acceptance}, part of the bound", rate / most)
    if arguments.peer:
        peer = Peer(model, arguments.draft_model, arguments.threads)
        for _ in range(arguments.rounds):
            for kind, options in peer.kinds(batch).items():
                for text, imposed in (("continue", None), ("edit", scripts)):
                    rate = peer.run(prompts, imposed, **options)
                    note(f"batch {batch}, {text}: transformers {kind}, tokens/s", rate)
    return figures


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, default=BUNDLED_MODEL, help="checkpoint folder")
    model.add_argument("--random-shape", choices=RANDOM_SHAPES, help="size of a random checkpoint")
    parser.add_argument("--draft-model", type=Path, help="checkpoint folder of a draft model of the same vocabulary")
    parser.add_argument(
        "--drafters", type=some_of("none", "ngram", "suffix"), default=("ngram", "suffix"), help="by comma"
    )
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
