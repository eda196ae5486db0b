"""Run by `test_hosts.py`: one of several processes of an engine, or the only one with all devices.

Arguments: the process, their number, the port of the first one, a name in CASES, and those of the case. Prints the
results as JSON, in process 0 alone.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax._src import distributed

if __name__ == "__main__" and int(sys.argv[2]) > 1:  # before any module computes with JAX
    jax.distributed.initialize(f"localhost:{sys.argv[3]}", int(sys.argv[2]), int(sys.argv[1]))

import pytest

import jaxinfer
from jaxinfer.checkpoint import load_checkpoint
from jaxinfer.config import Parallelism, SamplingParams
from jaxinfer.model import stages
from jaxinfer.parallel import hosts
from tests.parallel import engine_program
from tests.parallel.engine_program import PARAMS, PROMPTS, bits


def same_bits(checkpoint: str, tensor: str, experts: str, *settings: str) -> dict[str, Any]:
    """The bits of requests with and without drafts, grammars and forks, and the collectives of their steps."""
    options: dict[str, Any] = dict(setting.split("=") for setting in settings)
    options = {name: int(value) if value.isdigit() else value for name, value in options.items()}
    parallelism = Parallelism(tensor=int(tensor), experts=int(experts), stages=options.pop("stages", 1))
    stages.MIN_PART = 8  # or steps as small as these would be one part
    llm = engine_program.engine(checkpoint, parallelism, prefix_cache=True, **options)
    params = [*PARAMS, SamplingParams(regex="[ab]+", temperature=1.0, seed=3, max_tokens=6, log_probs=1)]
    prompts = [*PROMPTS, PROMPTS[1]]
    if llm.tokenizer is None:
        params, prompts = params[:3], prompts[:3]
    together = llm.generate(prompts, params, show_progress=False)
    request_id = llm.add(PROMPTS[0], replace(PARAMS[1], max_tokens=20))
    while not llm.step():
        pass
    llm.fork(request_id, seed=5)  # copies the last page
    forked = engine_program.finish(llm)
    if llm.engine_config.max_adapters:
        adapter = Path(checkpoint).parent / "adapter"
        if jax.process_count() > 1:
            read = llm._engine.read_adapter(adapter)
            for changes in ({"digest": "another"}, {"source": "/no/such/folder"}):
                with pytest.raises(ValueError, match="process 1 has another adapter"):
                    llm._engine.load_adapter("changed", replace(read, **changes))
        llm.load_adapter("changed", adapter)
        together += llm.generate(prompts, params, adapter="changed", show_progress=False)
    embedded = llm.embed(PROMPTS, pooling="mean", show_progress=False)
    results = {
        "bits": list(map(bits, together)),
        "forked": sorted(map(bits, forked.values())),
        "embedded": embedded.tolist(),
        "drafts": llm.metrics().num_drafted_tokens,
    }
    if jax.process_count() > 1:
        params, _ = load_checkpoint(checkpoint)
        request_id = llm.add(PROMPTS[0], PARAMS[0])
        refused = {"save": (request_id, "a"), "restore": ("a",), "update_params": (params,), "agreement": (together,)}
        for name, arguments in refused.items():
            with pytest.raises(ValueError, match=name):
                getattr(llm, name)(*arguments)
        engine_program.finish(llm)
        store: Any = distributed.global_state.client
        end = time.monotonic() + 60
        while len(store.key_value_dir_get_bytes("jaxinfer/launch/")) > 1:  # what all have read is deleted
            assert time.monotonic() < end
            time.sleep(0.1)
    llm.close()
    if jax.process_count() > 1:
        with pytest.raises(ValueError, match="one LLM in each start"):
            engine_program.engine(checkpoint, parallelism)
    return results


# Ways in which a process ends. SIGUSR1 stands for a script that catches an error and ends without it.
SIGNALS = {
    "kill": signal.SIGKILL,
    "terminate": signal.SIGTERM,
    "interrupt": signal.SIGINT,
    "leave": signal.SIGUSR1,
}


def disturbed(checkpoint: str, victim: str, way: str) -> dict[str, Any]:
    """Computes without end; after some launches one process ends as it is told to."""

    def disturb() -> None:
        while hosts._joined is None or hosts._joined._number < 10:
            time.sleep(0.05)
        if way in SIGNALS:
            os.kill(os.getpid(), SIGNALS[way])
            return
        hosts._joined._digest = b"another"

    def fail(*_: Any) -> None:
        raise LookupError("a mistake of the user")

    is_victim = jax.process_index() == int(victim)
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
    if is_victim and (way in SIGNALS or jax.process_index() > 0):
        threading.Thread(target=disturb, daemon=True).start()
    llm = engine_program.engine(checkpoint, Parallelism(tensor=4))
    for i in itertools.count():
        if is_victim and i == 3:
            llm.on_step = fail
        llm.generate(PROMPTS, PARAMS, show_progress=False)
    return {}


def at_random(num_steps: str) -> dict[str, Any]:
    """The tokens and log-probabilities of requests with grammars and drafts, by their numbers.

    Over several processes, many of them are aborted, forked, rewound, or end by a deadline; alone all run to their end.
    """
    model = str(Path(jaxinfer.__file__).parent / "assets" / "tiny")
    options: dict[str, Any] = {"speculation": "ngram", "max_drafts": 3, "prefix_cache": True}
    llm = engine_program.engine(model, Parallelism(tensor=4), **options)
    assert llm.tokenizer is not None
    draw, requests = random.Random(0), []
    for i in range(int(num_steps)):
        words = draw.choices(["import ", "numpy ", "as ", "np\n", "def f(x):\n"], k=draw.randrange(1, 12))
        grammar: dict[str, Any] = draw.choice([{}, {}, {}, {"regex": "[a-z ]{3,}"}, {"choices": ("yes", "no")}])
        sampling: dict[str, Any] = {"temperature": draw.choice([0.0, 0.8]), "max_tokens": draw.randrange(1, 24)}
        requests.append(("".join(words), SamplingParams(log_probs=1, seed=i, ignore_eos=True, **sampling, **grammar)))
    found: dict[int, Any] = {}
    if jax.process_count() == 1:
        ended = llm.generate([text for text, _ in requests], [own for _, own in requests], show_progress=False)
        return {"found": {i: (c.token_ids, c.log_probs) for i, c in enumerate(ended)}}
    steps, reasons, running, to_come = 0, Counter[str](), dict[int, int](), iter(enumerate(requests))
    while steps < int(num_steps) and (running or steps == 0):
        while len(running) < 6 and (request := next(to_come, None)) is not None:
            i, (text, own) = request
            deadline = draw.uniform(0.05, 2.0) if draw.random() < 0.2 else None
            running[llm.add(text, own, deadline=deadline)] = i
        for delta in llm.step():
            if (completion := delta.completion) is not None:
                i = running.pop(delta.request_id)
                reasons[completion.finish_reason] += 1
                if i >= 0:
                    found[i] = completion.token_ids, completion.log_probs
        steps = llm.metrics().num_steps
        chosen = draw.choice([*running] or [-1])
        if chosen >= 0 and draw.random() < 0.05:
            llm.abort(chosen)
        elif chosen >= 0 and draw.random() < 0.05:
            running[llm.fork(chosen, seed=steps)] = -1
    metrics = llm.metrics()
    counts = {"drafts": metrics.num_drafted_tokens, "preemptions": metrics.num_preemptions, "steps": steps}
    return {"found": found, "reasons": reasons, **counts}


CASES: dict[str, Callable[..., dict[str, Any]]] = {
    "same bits": same_bits,
    "disturbed": disturbed,
    "at random": at_random,
}


if __name__ == "__main__":
    case, *arguments = sys.argv[4:]
    print(json.dumps(CASES[case](*arguments)), flush=True)
