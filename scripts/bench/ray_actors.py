"""Measures a job of Ray Data whose stage has one or more actors.

python scripts/bench/ray_actors.py --actors 1 2 --requests 1000

The seconds of a job include the start of its actors, which load the model. Its rate is measured from the first record
of any actor to the last one, so it leaves the start out.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from datetime import date
from importlib.metadata import version
from typing import Any

import ray.data

from jaxinfer.batch_job.ray_data import EngineStage
from jaxinfer.device import describe_cpu

BATCH_SIZE = 64  # rows of a block, and of a call of the stage
PROMPT_LENS, OUTPUT_LENS = (20, 200), (16, 64)


def rows_of(num_requests: int) -> list[dict[str, Any]]:
    draw = random.Random(0)
    return [
        {
            "custom_id": str(index),
            "prompt": "".join(draw.choices("abcdefgh ", k=draw.randint(*PROMPT_LENS))),
            "max_tokens": draw.randint(*OUTPUT_LENS),
            "ignore_eos": True,
        }
        for index in range(num_requests)
    ]


class TimedStage(EngineStage):
    """Adds the time at which the batch of a record began and ended."""

    def __call__(self, batch: Any) -> Any:
        began = time.time()
        table = super().__call__(batch)
        for name, moment in (("began", began), ("ended", time.time())):
            table = table.append_column(name, [[moment] * table.num_rows])
        return table


def measure(num_actors: int, num_requests: int) -> str:
    """Returns a line with the seconds of the job and its tokens per second once an actor is ready."""
    dataset = ray.data.from_items(rows_of(num_requests), override_num_blocks=-(-num_requests // BATCH_SIZE))
    began = time.time()
    stage = dataset.map_batches(
        TimedStage,
        batch_format="pyarrow",
        batch_size=BATCH_SIZE,
        compute=ray.data.ActorPoolStrategy(size=num_actors),
        num_cpus=(os.cpu_count() or 1) / (num_actors + 1),
    )
    records = stage.take_all()
    seconds = time.time() - began
    num_tokens = sum(len(record["token_ids"]) for record in records)
    busy = max(record["ended"] for record in records) - min(record["began"] for record in records)
    return f"{num_actors} actors: {seconds:.1f} s, {num_tokens / busy:.0f} tokens/s in the {busy:.1f} s after the start"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--requests", type=int, default=1000)
    arguments = parser.parse_args()
    print(f"{date.today()}, {describe_cpu()}, jax {version('jax')}, ray {ray.__version__}")
    ray.init(log_to_driver=False)
    for num_actors in arguments.actors:
        print(measure(num_actors, arguments.requests), flush=True)


if __name__ == "__main__":
    main()
