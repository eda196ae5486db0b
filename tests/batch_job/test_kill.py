"""The real command with the bundled model, killed again and again."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from jaxinfer.batch_job import shard_path

NUM_REQUESTS = 240
NUM_HOSTS = 3
NUM_KILLS = int(os.environ.get("JAXINFER_KILLS", "5"))
# The steps of `LLM()`, which other tests need as well, so that they are compiled once.
ENGINE = ["--decode-loop-steps", "1"]


def write_requests(path: Path) -> None:
    """A third greedy, a third seeded, a third unseeded, of 4 to 15 tokens, with this and that asked for."""
    with path.open("w") as file:
        for i in range(NUM_REQUESTS):
            row = {"custom_id": f"request {i}", "prompt": f"def f{i}(", "max_tokens": 4 + i % 12}
            row |= [{"temperature": 0}, {"seed": i}, {"top_k": 50}][i % 3]
            row |= [{}, {"log_probs": 2}, {"stop": ["):"]}, {"ignore_eos": True}][i % 4]
            file.write(json.dumps(row) + "\n")


def start(folder: Path, output: str, *options: str) -> subprocess.Popen[bytes]:
    paths = [str(folder / "in.jsonl"), str(folder / output)]
    return subprocess.Popen([sys.executable, "-m", "jaxinfer", "batch", *paths, "--quiet", *options])


def wait_for_a_moment_to_kill(process: subprocess.Popen[bytes], output: Path, draw: random.Random) -> None:
    """Mostly a moment of generation, counted in bytes, so that the machine's speed does not matter."""
    if draw.random() < 0.2:
        time.sleep(draw.uniform(0, 3))
        return
    size = output.stat().st_size if output.exists() else 0
    target = size + draw.randrange(1, 2500)
    while process.poll() is None and (not output.exists() or output.stat().st_size < target):
        time.sleep(0.001)
    time.sleep(draw.uniform(0, 0.02))


def test_three_hosts_killed_again_and_again_yield_the_bytes_of_one_undisturbed(tmp_path):
    write_requests(tmp_path / "in.jsonl")
    assert start(tmp_path, "undisturbed.jsonl", *ENGINE).wait() == 0
    draw = random.Random(0)
    shards = [(index, NUM_HOSTS) for index in range(1, NUM_HOSTS + 1)]
    statuses = []
    for i in range(NUM_KILLS):
        index, count = shards[i % NUM_HOSTS]
        process = start(tmp_path, "out.jsonl", *ENGINE, "--shard", f"{index}/{count}")
        wait_for_a_moment_to_kill(process, Path(shard_path(tmp_path / "out.jsonl", (index, count))), draw)
        process.kill()
        statuses.append(process.wait())
    assert statuses == [-9] * NUM_KILLS
    hosts = [start(tmp_path, "out.jsonl", *ENGINE, "--shard", f"{index}/{count}") for index, count in shards]
    assert [host.wait() for host in hosts] == [0] * NUM_HOSTS
    assert start(tmp_path, "out.jsonl", "--merge").wait() == 0
    undisturbed = (tmp_path / "undisturbed.jsonl").read_bytes()
    assert [json.loads(raw)["line"] for raw in undisturbed.splitlines()] == list(range(1, NUM_REQUESTS + 1))
    assert (tmp_path / "out.jsonl").read_bytes() == undisturbed
