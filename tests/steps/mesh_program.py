"""Run by test_mesh_steps in a process with 4 devices: prefill and decode steps over 2 x 2 of them.

Arguments: a Hugging Face checkpoint, a JSON file of sequences of token ids, and the path for the results. These are the
log-probabilities f32[3, B, V] of all tokens after each sequence less two tokens, less one, and whole.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import numpy as np

from jaxinfer.checkpoint import load_params, read_config
from jaxinfer.config import CacheConfig, SamplingParams
from jaxinfer.model.batch import Row, make_batch
from jaxinfer.model.cache import cache_shardings
from jaxinfer.model.params import shardings
from jaxinfer.sampling.batch import make_sampling
from jaxinfer.steps import steps
from tests.replay import deal_pages, nan_cache
from tests.unoptimised import unoptimised_copy

PAGE_SIZE, TABLE_WIDTH = 16, 2
FIRST_CHUNK = 5  # tokens of each sequence


def main(checkpoint: str, sequences_file: str, results_file: str) -> None:
    compiled = unoptimised_copy(steps)
    config = read_config(checkpoint)
    sequences = json.loads(Path(sequences_file).read_text())
    B, V, longest = len(sequences), config.vocab_size, max(map(len, sequences))
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("experts", "model"))
    params = load_params(checkpoint, config, "float32", placement=shardings(config, mesh))
    pages = deal_pages(B, TABLE_WIDTH)
    cache = nan_cache(config, CacheConfig(num_pages=pages.size, page_size=PAGE_SIZE))
    cache = jax.device_put(cache, cache_shardings(cache, mesh, config=config))
    sampling = make_sampling([SamplingParams(temperature=0, log_probs=V)] * B, num_rows=B, vocab_size=V)

    def run(step, starts, ends, num_tokens):
        chunks = zip(sequences, starts, ends, pages, strict=True)
        rows = [Row(ids[start:end], start, row_pages.tolist()) for ids, start, end, row_pages in chunks]
        sizes = {"num_tokens": num_tokens, "num_rows": B, "table_width": TABLE_WIDTH, "page_size": PAGE_SIZE}
        output, new = step(
            params, cache, make_batch(rows, **sizes), sampling, config=config, max_log_probs=V, mesh=mesh
        )
        log_probs = np.zeros((B, V), np.float32)
        np.put_along_axis(log_probs, np.asarray(output.top_tokens), np.asarray(output.top_log_probs), axis=1)
        return log_probs, new

    lengths = [len(ids) for ids in sequences]
    firsts, prompts = [FIRST_CHUNK] * B, [n - 2 for n in lengths]
    _, cache = run(compiled.prefill_step, [0] * B, firsts, B * longest)
    results = []
    for step, starts, ends, num_tokens in (
        (compiled.prefill_step, firsts, prompts, B * longest),
        (compiled.decode_step, prompts, [n - 1 for n in lengths], B),
        (compiled.decode_step, [n - 1 for n in lengths], lengths, B),
    ):
        log_probs, cache = run(step, starts, ends, num_tokens)
        results.append(log_probs)
    np.save(results_file, np.stack(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
