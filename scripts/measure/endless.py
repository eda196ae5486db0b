"""Measures whether a model goes on predicting text that is much longer than what it sees, in bits per token.

usage: python scripts/measure/endless.py [--model PATH] [--seen 256 512] [--sinks 16] [--tokens 8000] [--files 4]

Each row is the mean over files of the held-out part of the corpus (`corpus.py`), a thousand tokens a column. The last
row has each thousand after the thousand before it alone, all of which is seen.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer import LLM, EngineConfig, SamplingParams
from jaxinfer.text.tokenizer import Tokenizer
from scripts.bench.against_transformers import BUNDLED_MODEL
from scripts.train.corpus import held_out_files

PAGE_SIZE, PIECE = 16, 1000
WANTED = SamplingParams(max_tokens=1, temperature=0, prompt_log_probs=0)


def long_texts(model: Path, num_tokens: int) -> Iterator[list[int]]:
    """Yields the first num_tokens tokens of each held-out file that is long enough."""
    tokenizer = Tokenizer.from_path(model)
    if tokenizer is None:
        raise ValueError(f"{model} has no tokenizer.json, so it cannot read text")
    for file in held_out_files():
        token_ids = tokenizer.encode(file.read_text(encoding="utf-8"))
        if len(token_ids) >= num_tokens:
            yield token_ids[:num_tokens]


def bits(llm: LLM, token_ids: Sequence[int]) -> np.ndarray:
    """Returns those of each token but the first."""
    completion = llm.generate([*token_ids], WANTED, show_progress=False)[0]
    return -np.array(completion.prompt_log_probs[1:], float) / math.log(2)


def by_thousand(per_token: np.ndarray) -> list[float]:
    return [float(per_token[start : start + PIECE].mean()) for start in range(0, len(per_token), PIECE)]


def report(name: str, rows: Sequence[list[float]]) -> None:
    print(f"{name:24}", *(f"{mean:6.2f}" for mean in np.mean(rows, axis=0)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL)
    parser.add_argument("--seen", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--sinks", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--files", type=int, default=4)
    arguments = parser.parse_args()
    texts = list(itertools.islice(long_texts(arguments.model, arguments.tokens), arguments.files))
    limits: dict[str, Any] = {"max_num_seqs": 1, "page_size": PAGE_SIZE, "max_prompt_log_probs": 0}
    for seen in arguments.seen:
        config = EngineConfig(max_model_len=seen, num_sink_tokens=arguments.sinks, **limits)
        llm = LLM(arguments.model, config=config)
        report(f"{seen} seen, {arguments.sinks} sinks", [by_thousand(bits(llm, text)) for text in texts])
    llm = LLM(arguments.model, config=EngineConfig(max_model_len=2 * PIECE + 1, **limits))
    starts = range(0, arguments.tokens, PIECE)
    pieces = [[bits(llm, text[max(i - PIECE, 0) : i + PIECE])[-PIECE:].mean() for i in starts] for text in texts]
    report("up to 2,000, all seen", pieces)


if __name__ == "__main__":
    main()
