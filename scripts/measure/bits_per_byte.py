"""Measures how well the bundled models predict the held-out part of their corpus, in bits per byte, by jaxinfer itself.

usage: python scripts/measure/bits_per_byte.py [CHECKPOINT ...] [--quantization int4] [--cache-dtype int8]
                                               [--page-size 128] [--num-exact 0]

The held-out files are those of `corpus.py` for the interpreter that runs this script. Every file begins after
an end-of-text token and is cut into windows of the model's length, as in training. Each token attends to the keys and
values of its window as the cache gives them back, its own included: a step writes them first, rounded. In int2 it
attends to those of its own page, and of --num-exact pages before, as they were computed.
"""

from __future__ import annotations

import argparse
import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxinfer import CacheConfig, ModelConfig, Row, init_cache, load_checkpoint, make_batch
from jaxinfer.config import NARROW_CACHE_DTYPES, QUANTIZATIONS
from jaxinfer.model.decoder import forward, unembed
from jaxinfer.model.page_kinds import NUM_EXACT, with_open_pages
from jaxinfer.text.tokenizer import Tokenizer
from scripts.train.corpus import held_out_files

BUNDLED = Path(__file__).resolve().parents[2] / "jaxinfer" / "assets"


@functools.partial(jax.jit, static_argnames="config")
def negative_log_likelihood(params, cache, batch, targets, *, config: ModelConfig) -> jax.Array:
    """Returns -ln p(target) f32[T] for the token that follows each token of the batch."""
    hidden, _ = forward(params, cache, batch, config=config)
    log_probs = jax.nn.log_softmax(unembed(params, hidden), axis=-1)
    return -jnp.take_along_axis(log_probs, targets[:, None], axis=-1)[:, 0]


def measure(path: Path, quantization: str | None, cache_dtype: str | None, page_size: int, num_exact: int) -> float:
    """Returns the bits per byte of the checkpoint at `path`; without `cache_dtype` its cache is in float32."""
    params, config = load_checkpoint(path, quantization=quantization)
    tokenizer = Tokenizer.from_path(path)
    if tokenizer is None:
        raise ValueError(f"{path} has no tokenizer.json, so it cannot read text")
    length = config.max_position
    num_pages = math.ceil(length / page_size)
    config = with_open_pages(config, num_exact) if cache_dtype == "int2" else config
    dtype = "float32" if cache_dtype is None else NARROW_CACHE_DTYPES[cache_dtype]
    cache = init_cache(config, CacheConfig(num_pages=num_pages, page_size=page_size, dtype=dtype))
    nats, num_bytes = 0.0, 0
    for file in tqdm(held_out_files(), desc=path.name, unit="file"):
        text = file.read_text(encoding="utf-8")
        num_bytes += len(text.encode())
        token_ids = tokenizer.encode(text)  # led by the token that stands between documents
        for start in range(0, len(token_ids) - 1, length):
            window = token_ids[start : start + length + 1]
            row = Row(window[:-1], 0, range(num_pages))
            batch = make_batch([row], page_size=page_size, num_tokens=length, num_rows=1, table_width=num_pages)
            targets = np.zeros(length, np.int32)
            targets[: len(window) - 1] = window[1:]
            losses = negative_log_likelihood(params, cache, batch, targets, config=config)
            nats += float(losses[: len(window) - 1].sum())
    return nats / math.log(2) / num_bytes


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoints", nargs="*", default=[BUNDLED / "tiny", BUNDLED / "tiny-draft"])
    parser.add_argument("--quantization", choices=QUANTIZATIONS)
    parser.add_argument("--cache-dtype", choices=NARROW_CACHE_DTYPES)
    parser.add_argument("--page-size", type=int, default=128)
    parser.add_argument("--num-exact", type=int, default=NUM_EXACT)
    arguments = parser.parse_args()
    for checkpoint in arguments.checkpoints:
        options = arguments.quantization, arguments.cache_dtype, arguments.page_size, arguments.num_exact
        bits = measure(Path(checkpoint), *options)
        print(f"{checkpoint}: {bits:.5f} bits per byte")
