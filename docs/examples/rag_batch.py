"""Answers many questions from a folder of texts (retrieval-augmented generation), as a job that resumes.

    python docs/examples/rag_batch.py FOLDER QUESTIONS.txt ANSWERS.jsonl [MODEL] [EMBEDDING_MODEL]

FOLDER has texts, and QUESTIONS.txt a question in each line. An embedding model finds the passages; without one the
model that reads them does. The bundled model shows the way and knows no answer. Run it again after a crash: finished
answers stay.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer import LLM, SamplingParams
from jaxinfer.batch_job import LineForm, Summary, run_batch

LIMITS: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 1024}  # for the bundled model; leave them out for another
PASSAGE = 600  # characters
NUM_FOUND = 2  # passages for each question
SYSTEM = "Answer in one sentence, from the passages alone."
PROMPT = "Passages:\n{passages}\n\nQuestion: {question}\nAnswer:"


def passages_of(folder: Path) -> list[str]:
    """Returns the texts of a folder in pieces."""
    texts = [file.read_text(encoding="utf-8") for file in sorted(folder.glob("**/*.txt"))]
    return [text[start : start + PASSAGE] for text in texts for start in range(0, len(text), PASSAGE)]


def nearest(llm: LLM, passages: list[str], questions: list[str]) -> list[list[str]]:
    """Returns the passages nearest to each question, by the cosine of their vectors f32[n, hidden]."""
    known, asked = llm.embed(passages, pooling="mean"), llm.embed(questions, pooling="mean")
    order = np.argsort(-(asked @ known.T), axis=1)[:, :NUM_FOUND]
    return [[passages[i] for i in row] for row in order]


def main(folder: str, questions_path: str, output: str, model: str | None = None, finder: str | None = None) -> Summary:
    questions = Path(questions_path).read_text(encoding="utf-8").splitlines()
    passages = passages_of(Path(folder))
    llm = LLM(model, **LIMITS)
    if finder is None:
        found = nearest(llm, passages, questions)
    else:
        with LLM(finder) as embedding_llm:
            found = nearest(embedding_llm, passages, questions)
    job = Path(output).with_suffix(".job.jsonl")
    lines = [{"question": question, "passages": "\n".join(own)} for question, own in zip(questions, found, strict=True)]
    job.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    form = LineForm(
        prompt=PROMPT,
        system=None if model is None else SYSTEM,  # makes each line a conversation, for models that chat
        kept=("question",),
        fields=("text", "finish_reason"),
        sampling_params=SamplingParams(max_tokens=64, temperature=0.0, stop="\n"),
    )
    with llm:
        return run_batch(llm, job, output, form=form)


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
