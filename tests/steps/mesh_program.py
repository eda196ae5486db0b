"""Run by test_mesh_steps in a process with 4 devices: prefill and decode steps over 2 x 2 of them.

Arguments: a Hugging Face checkpoint, a JSON file of sequences of token ids, the path for the results, and the way to
compute: "plain", a quantization such as "int8", or "int8 by the kernel of a TPU", which is interpreted. The results are
the log-probabilities f32[3, B, V] of all tokens after each sequence less two tokens, less one, and whole. Quantized
steps give [2, 3, B, V]: those over the mesh come after those of one device.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxinfer.checkpoint import load_params, read_config
from jaxinfer.config import CacheConfig, SamplingParams
from jaxinfer.model import batch, decoder
from jaxinfer.model.batch import Row, make_batch
from jaxinfer.model.cache import cache_shardings
from jaxinfer.model.components import experts, layers
from jaxinfer.model.params import Params, shardings
from jaxinfer.model.quantized_params import quantize_weights, quantized_shardings
from jaxinfer.sampling.batch import make_sampling
from jaxinfer.steps import steps
from jaxinfer.steps.steps import StepOptions
from tests.replay import deal_pages, nan_cache

PAGE_SIZE, TABLE_WIDTH = 16, 2
FIRST_CHUNK = 5  # tokens of each sequence


def main(checkpoint: str, sequences_file: str, results_file: str, way: str) -> None:
    config, sequences = read_config(checkpoint), json.loads(Path(sequences_file).read_text())
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("experts", "model"))
    placement = shardings(config, mesh)
    run = functools.partial(run_steps, config=config, sequences=sequences)
    if way == "plain":
        results = run(load_params(checkpoint, config, "float32", placement=placement), mesh=mesh)
    else:
        has_kernel = "kernel" in way
        params = load_params(checkpoint, config, "float32")
        params = quantize_weights(params, config, way.split()[0], is_packed=not has_kernel)
        of_one_device = run(params, mesh=None)
        if has_kernel:
            take_products_of_a_tpu()
        over_mesh = run(jax.device_put(params, quantized_shardings(params, config, placement)), mesh=mesh)
        results = np.stack([of_one_device, over_mesh])
    np.save(results_file, results)


def take_products_of_a_tpu() -> None:
    """Makes products by integers, and rows of embeddings, those of a TPU: its kernels, interpreted."""
    choose = jax.lax.platform_dependent

    def take(*operands: Any, tpu: Any = None, **others: Any) -> Any:
        return choose(*operands, **others) if tpu is None else tpu(*operands)

    jax.lax.platform_dependent = take
    experts._in_blocks = experts._in_groups
    batch.has_ordered_sums = lambda _: False  # kernels split over a mesh add by themselves
    layers.quantized_matmul = functools.partial(layers.quantized_matmul, implementation="tpu_interpret")
    decoder.table_rows = functools.partial(decoder.table_rows, interpret=True)
    jax.clear_caches()


def run_steps(params: Params, *, config: Any, sequences: list[list[int]], mesh: Any) -> np.ndarray:
    """Returns the log-probabilities f32[3, B, V] of the steps."""
    B, V, longest = len(sequences), config.vocab_size, max(map(len, sequences))
    pages = deal_pages(B, TABLE_WIDTH)
    cache = nan_cache(config, CacheConfig(num_pages=pages.size, page_size=PAGE_SIZE))
    if mesh is not None:
        cache = jax.device_put(cache, cache_shardings(cache, mesh, config=config))
    options = StepOptions(config=config, max_log_probs=V, mesh=mesh)
    sampling = make_sampling([SamplingParams(temperature=0, log_probs=V)] * B, num_rows=B, vocab_size=V)

    def run(step, starts, ends, num_tokens):
        chunks = zip(sequences, starts, ends, pages, strict=True)
        rows = [Row(ids[start:end], start, row_pages.tolist()) for ids, start, end, row_pages in chunks]
        sizes = {"num_tokens": num_tokens, "num_rows": B, "table_width": TABLE_WIDTH, "page_size": PAGE_SIZE}
        output, new = step(params, cache, make_batch(rows, **sizes), sampling, options=options)
        log_probs = np.zeros((B, V), np.float32)
        np.put_along_axis(log_probs, np.asarray(output.top_tokens), np.asarray(output.top_log_probs), axis=1)
        return log_probs, new

    lengths = [len(ids) for ids in sequences]
    firsts, prompts = [FIRST_CHUNK] * B, [n - 2 for n in lengths]
    _, cache = run(steps.prefill_step, [0] * B, firsts, B * longest)
    results = []
    for step, starts, ends, num_tokens in (
        (steps.prefill_step, firsts, prompts, B * longest),
        (steps.decode_step, prompts, [n - 1 for n in lengths], B),
        (steps.decode_step, [n - 1 for n in lengths], lengths, B),
    ):
        log_probs, cache = run(step, starts, ends, num_tokens)
        results.append(log_probs)
    return np.stack(results)


if __name__ == "__main__":
    main(*sys.argv[1:])
