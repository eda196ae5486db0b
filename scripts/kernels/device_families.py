"""Runs models of several families through the whole engine on the device at hand, in bfloat16.

    python scripts/kernels/device_families.py [--families llama gpt_oss] [--json FILE]

Run it in a clone on a machine with a GPU or TPU; it needs the extra `test`. Random checkpoints serve 24 requests from
few pages, with chunks, prefix hits, preemption, drafts and decode loops. The log-probabilities that the engine reports
are compared with those of transformers in float32 on CPU, for the same tokens. It ends with 1 if the median error of a
family is 0.05 or more, if there was no preemption, prefix hit or accepted draft, or if the engine fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from jaxinfer import LLM, EngineConfig, SamplingParams  # noqa: E402
from scripts.kernels.on_device.device import describe_device, print_device  # noqa: E402
from tests.engine.engines import (  # noqa: E402
    ScriptedDrafter,
    drafts_from,
    poison_cache,
    random_prompts,
    run_with_arrivals,
)
from tests.on_demand import steps_on_demand  # noqa: E402
from tests.oracles import load_reference, reference_logits, save_random_checkpoint  # noqa: E402

# Half of the numbers differ by less in bfloat16; another choice of experts changes the rest by more.
MEDIAN_ERROR = 0.05
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
HEADS: dict[str, Any] = {"head_dim": 64}
MOE: dict[str, Any] = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 48}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": HEADS,
    "gemma3_text": {**HEADS, **ALTERNATING, "query_pre_attn_scalar": 64},
    "gemma4_text": {
        **{**HEADS, "global_head_dim": 128, "num_global_key_value_heads": 1, "sliding_window": 48},
        **{"hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 512, "moe_intermediate_size": 128},
    },
    "gpt_oss": {**HEADS, **ALTERNATING, "num_local_experts": 8},
    "qwen3_moe": {**HEADS, **MOE, "num_experts": 16},
    "deepseek_v3": {
        **MOE,
        "num_key_value_heads": 8,
        "q_lora_rank": 64,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
    },
    "qwen3_next": {
        **HEADS,
        **MOE,
        "shared_expert_intermediate_size": 128,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    "falcon_h1": {**HEADS, "mamba_d_ssm": 512, "mamba_n_heads": 8, "mamba_d_state": 64},
    "jamba": {"num_experts": 8, "attn_layer_period": 3, "attn_layer_offset": 1},
    "granitemoehybrid": {"shared_intermediate_size": 128, "mamba_n_heads": 8, "mamba_d_state": 64},
}
LIMITS: dict[str, Any] = {
    "max_num_seqs": 6,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
    "page_size": 32,
    "num_pages": 16,
    "host_cache_bytes": 2**26,
    "adaptive_drafts": False,
    "max_drafts": 3,
    "max_listed_tokens": 512,
}
NUM_REQUESTS = 24


def check_family(family: str) -> dict[str, Any]:
    """Returns errors and counts of one family; raises what the engine raises."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="random-model-") as folder:
        path = save_random_checkpoint(folder, family, **{**SIZES, **FAMILIES[family]})
        shared = list(range(20, 90))
        tails = random_prompts(NUM_REQUESTS, max_len=90, seed=2, vocab_size=512)
        prompts = [[*shared, *tail] if i % 2 else tail for i, tail in enumerate(tails)]
        lengths = np.random.default_rng(4).integers(8, 40, NUM_REQUESTS).tolist()
        params = [
            SamplingParams(temperature=i % 2 * 0.8, seed=i, max_tokens=n, ignore_eos=True)
            for i, n in enumerate(lengths)
        ]
        config = EngineConfig(**LIMITS)
        with steps_on_demand(), LLM(path, dtype="bfloat16", config=config, speculation=ScriptedDrafter(0)) as llm:
            poison_cache(llm)
            done = run_with_arrivals(llm, prompts, params, mean_arrivals=0.5)
            with drafts_from(llm, ScriptedDrafter(0.7, done)):
                done += run_with_arrivals(llm, prompts, params, mean_arrivals=0.5)
            metrics = llm.metrics()
        with steps_on_demand(), LLM(path, dtype="bfloat16", config=replace(config, decode_loop_steps=4)) as llm:
            poison_cache(llm)
            done += run_with_arrivals(llm, prompts, params, mean_arrivals=0.5)
        reference = load_reference(path)
        errors = [error for completion in done for error in errors_of(reference, completion)]
    counts = {
        "preemptions": metrics.num_preemptions,
        "cached tokens": sum(completion.num_cached_tokens for completion in done),
        "accepted drafts": metrics.num_accepted_tokens,
    }
    return {
        "family": family,
        "median": float(np.median(errors)),
        "of 99 %": float(np.quantile(errors, 0.99)),
        "numbers": len(errors),
        **counts,
        "seconds": round(time.perf_counter() - began, 1),
        "passes": bool(np.median(errors) < MEDIAN_ERROR and np.isfinite(errors).all() and all(counts.values())),
    }


def errors_of(reference: Any, completion: Any) -> np.ndarray:
    """Returns how far each reported log-probability is from that of the reference."""
    prompt, tokens = list(completion.prompt_token_ids), list(completion.token_ids)
    logits = reference_logits(reference, [*prompt, *tokens]).astype(np.float64)[len(prompt) - 1 : -1]
    log_probs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    return np.abs(log_probs[range(len(tokens)), tokens] - np.array(completion.log_probs))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="all unless given")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    options = parser.parse_args(arguments)
    about = describe_device()
    print_device(about)
    records = []
    for family in options.families:
        try:
            records.append(check_family(family))
        except Exception as error:  # the other families are worth knowing as well
            records.append({"family": family, "passes": False, "error": f"{type(error).__name__}: {error}"})
        print(" · ".join(f"{name} {value}" for name, value in records[-1].items()), flush=True)
    if options.json:
        options.json.write_text(json.dumps({**about, "records": records}, indent=1) + "\n")
    return 0 if all(record["passes"] for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
