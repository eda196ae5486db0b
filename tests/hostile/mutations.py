"""Mutations of files that a model is read from, and the limits of reading one.

JAXINFER_MUTATIONS=1000 makes that many of each container, and 300 of each format of weights; the default is a tenth.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import struct
import tracemalloc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxinfer.checkpoint import abstract_checkpoint, load_checkpoint
from tests.hostile.cases import limits

MUTATIONS = int(os.environ.get("JAXINFER_MUTATIONS", "100"))
OF_A_FORMAT = math.ceil(0.3 * MUTATIONS)
SECONDS_PER_FILE = 10.0
# Numbers of 4 bits become float32 on the way, and some copies of them are there at once.
BYTES_PER_BYTE, BYTES_PER_FILE = 16, 2**25
VALUES = [
    *(None, True, False, -1, 0, 1, 3, 4.0, 64, 2**31, 2**40, 2**70, 10**30, 0.5, -2.5, 1e300, math.nan, math.inf),
    *("", "x", "[1]", [], [1], [None], ["x"], ["Linear"], [[]], {}, {"x": 1}, {"x": {}}),
]


def read_mutants(path: Path, mutants: Iterable[dict[str, bytes]]) -> list[str]:
    """Loads a checkpoint with the contents of files by name, and returns the messages of mutants that are refused.

    All others have the tensors that their configuration declares.
    """
    whole, messages = {file.name: file.read_bytes() for file in path.iterdir()}, list[str]()
    for mutant in mutants:
        for name, content in (whole | mutant).items():
            (path / name).unlink()  # parameters of the one before may lie in it
            (path / name).write_bytes(content)
        try:
            with file_limits(*path.iterdir()):
                params, _ = load_checkpoint(path, "float32")
        except ValueError as error:
            messages.append(str(error))
        else:
            planned, _ = abstract_checkpoint(path, "float32")
            assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, planned)
    assert [message for message in messages if str(path) not in message] == []
    return messages


@contextlib.contextmanager
def file_limits(*files: Path) -> Iterator[None]:
    """Fails a case that reads files for more than 10 s, or makes arrays and objects of another size class."""
    most = BYTES_PER_BYTE * sum(file.stat().st_size for file in files) + BYTES_PER_FILE
    tracemalloc.start()
    try:
        with limits(SECONDS_PER_FILE):
            yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < most, f"reading took {peak} bytes, more than {most}"


def mutated(content: bytes, header: int, rng: np.random.Generator) -> bytes:
    """Returns a file with a few bytes or a number changed, most of them in the header, or one cut or longer."""
    changed = bytearray(content)
    kind = rng.integers(8)
    if kind == 0:
        return bytes(changed[: rng.integers(len(changed))])
    if kind == 1:
        at = rng.integers(header)
        return bytes(changed[:at] + bytes(int(rng.integers(1, 40))) + changed[at:])
    if kind == 2:
        at, length = rng.integers(header), rng.integers(1, 40)
        return bytes(changed[:at] + changed[at + length :])
    if kind == 3:
        at = int(rng.integers(header - 8))
        changed[at : at + 8] = struct.pack("<Q", int(2 ** rng.uniform(0, 63.9)))
        return bytes(changed)
    if kind == 4:
        at, other = (int(i) for i in rng.integers(header - 16, size=2))
        changed[at : at + 16], changed[other : other + 16] = changed[other : other + 16], changed[at : at + 16]
        return bytes(changed)
    end = header if kind < 7 else len(changed)
    for at in rng.integers(end, size=rng.integers(1, 5)):
        changed[at] = rng.integers(256)
    return bytes(changed)


def mutated_safetensors(content: bytes, rng: np.random.Generator) -> bytes:
    """Returns a file of safetensors mutated as bytes, or with a header of JSON whose length is right."""
    start = 8 + int.from_bytes(content[:8], "little")
    if rng.random() < 0.5:
        return mutated(content, start, rng)
    header = mutated_json(json.loads(content[8:start]), rng)
    return len(header).to_bytes(8, "little") + header + content[start:]


def mutated_json(content: dict[str, Any], rng: np.random.Generator) -> bytes:
    """Returns JSON mutated as bytes, or with other entries."""
    if rng.random() < 0.2:
        whole = json.dumps(content).encode()
        return mutated(whole, len(whole), rng)
    return json.dumps(with_other_entries(content, rng)).encode()


def with_other_entries(content: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Returns content of JSON with an entry or two changed at any depth, taken away or moved."""
    changed = copy.deepcopy(content)
    for _ in range(rng.integers(1, 3)):
        node, key = _place(changed, rng)
        kind = rng.integers(6)
        if kind == 0:
            del node[key]
        elif kind == 1:
            other, place = _place(content, rng)
            node[key] = copy.deepcopy(other[place])
        elif kind == 2 and isinstance(node[key], int | float):
            node[key] = [node[key] + 1, node[key] * 2, node[key] - 1, -node[key]][rng.integers(4)]
        else:
            node[key] = VALUES[rng.integers(len(VALUES))]
        if not changed:
            break
    return changed


def _place(content: Any, rng: np.random.Generator) -> tuple[Any, Any]:
    """Returns an object or a list at any depth, and a key of it."""
    node = content
    while True:
        keys = sorted(node) if isinstance(node, dict) else range(len(node))
        key = keys[rng.integers(len(keys))]
        if not isinstance(node[key], dict | list) or not node[key] or rng.random() < 0.2:
            return node, key
        node = node[key]
