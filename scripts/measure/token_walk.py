"""The files and functions that a token passes: the host of one plain decode step, and the trace of its program.

    python scripts/measure/token_walk.py            counts, and the files of both
    python scripts/measure/token_walk.py --write    also sets the line of each place in docs/architecture.md

Both are counted by a profiler in this process, on CPU, for two greedy requests of the bundled model. Each function is
named as `jaxinfer/engine/llm.py LLM.step`.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxinfer import LLM, SamplingParams
from jaxinfer.config import CacheConfig
from jaxinfer.model.batch import Row, make_batch
from jaxinfer.model.cache import abstract_cache
from jaxinfer.model.params import abstract_params
from jaxinfer.sampling.batch import make_sampling
from jaxinfer.steps.steps import StepOptions, decode_step

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/architecture.md"
# A place in the page: a file and line, then what is there.
PLACE = re.compile(r"`((?:jaxinfer|kernels_pallas)/[\w/]+\.py):(\d+)`(\s+)`([\w.]+)`")
PLAIN = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)

Passed = set[tuple[str, str]]  # files and functions


def profiled(run: Callable[[], Any]) -> Passed:
    """Returns the project's functions that are called while `run()` runs on this thread."""
    passed: Passed = set()

    def note(frame: Any, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(ROOT):
            passed.add((file.relative_to(ROOT).as_posix(), frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return {place for place in passed if place[0].startswith(("jaxinfer/", "kernels_pallas/"))}


def walk() -> tuple[Passed, Passed]:
    """Returns what the host passes in a decode step, and what the trace of such a step passes."""
    with LLM() as llm:
        for prompt in ([5, 6, 7, 8], [9, 10, 11]):
            llm.add(prompt, PLAIN)
        for _ in range(6):
            llm.step()
        host, config = profiled(llm.step), llm.model_config
    batch = make_batch([Row([5], 3, [0])], page_size=16, num_tokens=1, num_rows=1, table_width=2)
    sampling = make_sampling([PLAIN], num_rows=1, seeds=[0], prompt_lens=[3])
    cache = abstract_cache(config, CacheConfig(num_pages=4, page_size=16, dtype="float32"))
    options = StepOptions(config=config, form="plain")
    arrays = abstract_params(config, "float32"), cache, batch, sampling
    jax.clear_caches()  # what the engine has traced already would not be traced again
    return host, profiled(lambda: jax.eval_shape(lambda *arrays: decode_step(*arrays, options=options), *arrays))


def line_of(file: str, name: str) -> int:
    """Returns the line of a function, class or method in a file.

    Raises:
      LookupError: if there is none.
    """
    nodes: list[Any] = ast.parse((ROOT / file).read_text()).body
    found = None
    for part in name.split("."):
        found = next((node for node in nodes if getattr(node, "name", None) == part), None)
        if found is None:
            raise LookupError(f"{file} has no {name}; name what is there")
        nodes = found.body
    assert found is not None
    return found.lineno


def with_lines(page: str) -> str:
    """Returns a page with the line at which each of its places is."""
    return PLACE.sub(lambda place: f"`{place[1]}:{line_of(place[1], place[4])}`{place[3]}`{place[4]}`", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="sets the lines in docs/architecture.md")
    if parser.parse_args().write:
        PAGE.write_text(with_lines(PAGE.read_text()))
    host, trace = walk()
    for name, passed in (("host", host), ("trace", trace)):
        files = sorted({file for file, _ in passed})
        print(f"{name}: {len(files)} files, {len(passed)} functions\n ", "\n  ".join(files))
    files = {file for file, _ in host | trace}
    lines = sum(len((ROOT / file).read_text().splitlines()) for file in files)
    print(f"both: {len(files)} files, {lines:,} lines")


if __name__ == "__main__":
    main()
