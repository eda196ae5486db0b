"""Writes the documents of the two tasks from the source of this project."""

from __future__ import annotations

import json
import random
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = sorted((HERE.parents[2] / "jaxinfer").rglob("*.py"))
NUM_DOCUMENTS = 100
NUM_CONTEXT_LINES = 6


def main() -> None:
    rng = random.Random(0)
    files = [path.read_text(encoding="utf-8").splitlines() for path in SOURCES]
    files = [lines for lines in files if len(lines) > 40]

    def line_of(lines: list[str]) -> int:
        while True:
            place = rng.randrange(NUM_CONTEXT_LINES, len(lines))
            if len(lines[place].strip()) > 8:
                return place

    with open(HERE / "next_line.jsonl", "w", encoding="utf-8") as file:
        for _ in range(NUM_DOCUMENTS):
            lines = rng.choice(files)
            place = line_of(lines)
            others = [rng.choice(files) for _ in range(3)]
            choices = [lines[place], *(other[line_of(other)] for other in others)]
            order = rng.sample(range(4), 4)
            document = {
                "context": "\n".join(lines[place - NUM_CONTEXT_LINES : place]) + "\n",
                "choices": [choices[i] for i in order],
                "gold": order.index(0),
            }
            file.write(json.dumps(document) + "\n")
    with open(HERE / "next_token.jsonl", "w", encoding="utf-8") as file:
        for _ in range(NUM_DOCUMENTS):
            lines = rng.choice(files)
            place = line_of(lines)
            cut = max(len(lines[place]) - rng.randint(1, 4), 1)
            before = lines[place - NUM_CONTEXT_LINES : place]
            document = {"context": "\n".join([*before, lines[place][:cut]]), "rest": lines[place][cut:]}
            file.write(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
