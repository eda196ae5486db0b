"""Measures how long a model takes until it can generate, and its peak memory, beside transformers on one checkpoint.

The checkpoint is random, of the shape of Qwen3-0.6B, bfloat16 on disk and float32 in memory. Every measurement is a
process of its own; the file is in the page cache. "uncompiled" begins with an empty cache folder, "compiled" finds the
steps on disk. Peak memory is that of the resident set, pages of the mapped file included.

python scripts/bench/loading.py --rounds 3
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

SHAPE = {
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40_960,
}
REPORT = """
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in KiB
print(json.dumps({"seconds": time.perf_counter() - began, "GiB": peak / 2**20}))
"""
OURS = f"""
import json, resource, sys, time
from jaxinfer import LLM, EngineConfig
began = time.perf_counter()
llm = LLM(sys.argv[1], config=EngineConfig(max_num_seqs=4, max_model_len=1024), dtype="float32")
{REPORT}
"""
THEIRS = f"""
import json, resource, sys, time
import torch
from transformers import AutoModelForCausalLM
began = time.perf_counter()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
{REPORT}
"""


def save_random_model(folder: Path) -> None:
    """Saves the checkpoint in a process of its own, so that its memory is given back."""
    code = (
        "import sys, json, torch\n"
        "from transformers import Qwen3Config, Qwen3ForCausalLM\n"
        "torch.manual_seed(0)\n"
        "model = Qwen3ForCausalLM(Qwen3Config(**json.loads(sys.argv[2]))).to(torch.bfloat16)\n"
        "model.save_pretrained(sys.argv[1])\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code, str(folder), json.dumps(SHAPE)], check=True)


def measure(code: str, folder: Path, cache: Path) -> dict[str, float]:
    """Runs the code in a process of its own and returns what it reports."""
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-P", "-c", code, str(folder)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--checkpoint", type=Path, help="folder of a checkpoint; a random one by default")
    arguments = parser.parse_args()
    figures: dict[str, list[dict[str, float]]] = {"transformers": [], "uncompiled": [], "compiled": []}
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.checkpoint or Path(name) / "model"
        if arguments.checkpoint is None:
            save_random_model(folder)
        for number in range(arguments.rounds):
            cache = Path(name) / f"cache {number}"
            for label, code in (("transformers", THEIRS), ("uncompiled", OURS), ("compiled", OURS)):
                figures[label].append(measure(code, folder, cache))
                print(label, figures[label][-1], flush=True)
    for label, runs in figures.items():
        seconds, size = (median(run[key] for run in runs) for key in ("seconds", "GiB"))
        print(f"{label}: {seconds:.1f} s, peak of {size:.2f} GiB")


if __name__ == "__main__":
    main()
