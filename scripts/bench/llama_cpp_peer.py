"""The side of llama.cpp in `against_transformers.py`, to be run in a process of its own.

It needs the packages llama-cpp-python and gguf, and a checkpoint of Llama. Weights and cache are float32. As for
transformers, a figure times the bare forward with argmax, without the host work of a server.
"""

from __future__ import annotations

import importlib
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import ml_dtypes  # noqa: F401, NumPy then knows bfloat16
import numpy as np
from safetensors import safe_open

from scripts.bench.workload import (
    PREFILL_BATCH,
    PREFILL_LEN,
    TPOT_OUTPUT_LEN,
    TPOT_PROMPT_LEN,
    TTFT_LEN,
    WARM_STEPS,
    Task,
    Workload,
    milliseconds,
)

gguf: Any = importlib.import_module("gguf")
llama_cpp: Any = importlib.import_module("llama_cpp")

F32 = 0  # ggml's name of the type
# By the name in a Hugging Face checkpoint, the name in a GGUF file.
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """Returns the GGUF name of a Llama tensor of a Hugging Face checkpoint; raises ValueError for another tensor."""
    stem = name.removesuffix(".weight")
    if stem in NAMES:
        return f"{NAMES[stem]}.weight"
    layer, _, inner = stem.removeprefix("model.layers.").partition(".")
    if inner not in LAYER_NAMES:
        raise ValueError(f"tensor {name} is not one of a Llama, so llama.cpp is not measured; leave it out of --sides")
    return f"blk.{layer}.{LAYER_NAMES[inner]}.weight"


def pair_neighbours(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """Returns q or k weights [N·H, D] for a rotation of neighbouring channels instead of the two halves of a head."""
    heads = weights.reshape(num_heads, 2, -1, weights.shape[-1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(weights.shape)


def write_gguf(folder: Path, path: Path) -> None:
    """Writes the Llama of a Hugging Face folder in float32, without its tokenizer."""
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"model_type={config['model_type']!r} is not llama; leave llama.cpp out of --sides")
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    theta = config.get("rope_theta") or config.get("rope_parameters", {}).get("rope_theta", 10_000.0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118, no mapping
                weights = tensors.get_tensor(name).astype(np.float32)
                if name.endswith(("q_proj.weight", "k_proj.weight")):
                    weights = pair_neighbours(weights, num_heads if "q_proj" in name else num_kv_heads)
                writer.add_tensor(gguf_name(name), weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@dataclass
class Model:
    """A loaded model, and one batch that all calls fill."""

    context: Any
    batch: Any
    vocab_size: int
    handle: Any  # keeps the weights alive

    def clear(self) -> None:
        """Forgets all sequences."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), False)

    def forward(self, tokens: list[list[int]], begin: int) -> list[int]:
        """Returns the next token of each sequence that gets `tokens`, which begin at the same position in each."""
        batch, count, last = self.batch, 0, []
        for sequence, row in enumerate(tokens):
            for offset, token in enumerate(row):
                batch.token[count], batch.pos[count] = token, begin + offset
                batch.n_seq_id[count], batch.seq_id[count][0] = 1, sequence
                batch.logits[count] = offset == len(row) - 1
                count += 1
            last += [count - 1] if row else []
        batch.n_tokens = count
        if code := llama_cpp.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode ended with {code}")
        rows = (llama_cpp.llama_get_logits_ith(self.context, index) for index in last)
        return [int(np.ctypeslib.as_array(row, (self.vocab_size,)).argmax()) for row in rows]


def load(folder: Path, workload: Workload) -> Model:
    """Returns the model with a float32 cache for the largest batch and context."""
    if workload.device != "cpu":
        raise ValueError("llama.cpp is measured on the CPU; leave it out of --sides")
    llama_cpp.llama_backend_init()
    with tempfile.TemporaryDirectory(prefix="gguf-") as scratch:
        path = Path(scratch) / "model.gguf"
        write_gguf(folder, path)
        options = llama_cpp.llama_model_default_params()
        options.use_mmap = False
        handle = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
    if handle is None:
        raise RuntimeError("llama.cpp could not load the checkpoint; its reason is above")
    num_rows = max(PREFILL_BATCH, *workload.batches)
    lengths = (PREFILL_LEN, TTFT_LEN, TPOT_PROMPT_LEN + TPOT_OUTPUT_LEN, *workload.contexts)
    num_tokens = max(PREFILL_BATCH * PREFILL_LEN, *lengths)
    limits = llama_cpp.llama_context_default_params()
    limits.n_seq_max = num_rows
    limits.n_ctx = num_rows * (max(lengths) + WARM_STEPS + workload.steps)
    limits.n_batch = num_tokens
    limits.n_threads = limits.n_threads_batch = workload.threads
    limits.type_k = limits.type_v = F32
    context = llama_cpp.llama_init_from_model(handle, limits)
    if context is None:
        raise RuntimeError("llama.cpp could not allocate its cache; its reason is above")
    return Model(context, llama_cpp.llama_batch_init(num_tokens, 0, 1), workload.vocab_size, handle)


def measure_prefill(model: Model, workload: Workload, task: Task, purpose: str) -> float:
    prompts = workload.prompts(PREFILL_BATCH, PREFILL_LEN, purpose)
    return 1e3 * PREFILL_BATCH * PREFILL_LEN / milliseconds(lambda _: prefill(model, prompts), workload.repeats)


def measure_ttft(model: Model, workload: Workload, task: Task, purpose: str) -> float:
    prompts = workload.prompts(1, TTFT_LEN, purpose)
    return milliseconds(lambda _: prefill(model, prompts), workload.repeats)


def prefill(model: Model, prompts: list[list[int]]) -> list[int]:
    model.clear()
    return model.forward(prompts, 0)


def measure_tpot(model: Model, workload: Workload, task: Task, purpose: str) -> float:
    results = []
    for index in range(workload.repeats + 1):
        tokens = prefill(model, workload.prompts(1, TPOT_PROMPT_LEN, f"{purpose} {index}"))
        times = step_times(model, tokens, TPOT_PROMPT_LEN, TPOT_OUTPUT_LEN - 1)
        results.append(sum(times) / len(times))
    return median(results[1:])


def measure_decode(model: Model, workload: Workload, task: Task, purpose: str) -> float:
    """All rows hold the same prompt, each in a cache of its own; they are prefilled one after another."""
    model.clear()
    (prompt,) = workload.prompts(1, task.context, purpose)
    tokens: list[int] = []
    for row in range(task.batch):
        nothing: list[list[int]] = [[]] * row
        tokens += model.forward([*nothing, prompt], 0)
    return median(step_times(model, tokens, task.context, WARM_STEPS + workload.steps)[WARM_STEPS:])


def step_times(model: Model, tokens: list[int], begin: int, count: int) -> list[float]:
    """Returns the milliseconds of `count` decode steps after `begin` tokens of each sequence."""
    times = []
    for position in range(begin, begin + count):
        began = time.perf_counter()
        tokens = model.forward([[token] for token in tokens], position)
        times.append(1e3 * (time.perf_counter() - began))
    return times


MEASURES = {"prefill": measure_prefill, "decode": measure_decode, "ttft": measure_ttft, "tpot": measure_tpot}
