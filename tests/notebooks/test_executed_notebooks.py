"""Each notebook runs from its first cell to its last, and its results hold against independent ones.

Two of them run outside the clone, beside a wheel that their first cell installs; the other ones run in the clone.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import scipy.special

from jaxinfer.engine.engine import BUNDLED_MODEL
from tests.notebooks.notebooks import NOTEBOOKS, ROOT, Executed
from tests.oracles import load_reference, reference_logits
from tests.test_packaging import PACKAGES, builds

# Log-probabilities of `transformers` in float32 differ by the order of its sums.
TOLERANCE = 1e-3
OUTSIDE = ("1_first_steps", "2_what_the_engine_knows")  # the quickest; they run from a wheel


@pytest.fixture(scope="module")
def reference():
    """Returns the log-probabilities f32[T - 1, V] that `transformers` gives the tokens after each of T."""
    model = load_reference(BUNDLED_MODEL)

    def log_probs(token_ids: list[int]) -> np.ndarray:
        return scipy.special.log_softmax(reference_logits(model, token_ids)[:-1], axis=-1)

    return log_probs


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Returns the wheel that the command of docs/notebooks.md builds."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in (*PACKAGES, "pyproject.toml", "README.md", "LICENSE"):  # building writes beside them
        (source / name).symlink_to(ROOT / name)
    offline = ["--no-index", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *offline, "."], cwd=source, check=True
    )
    (path,) = folder.iterdir()
    return path


@pytest.fixture
def python_without_jaxinfer(tmp_path):
    """Returns the Python of a new environment with all packages of this one but jaxinfer."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for path in map(Path, {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}):
        for package in path.iterdir():
            if not re.match(r"jaxinfer|kernels_pallas|__editable__|.*\.pth$", package.name):
                (packages / package.name).symlink_to(package)
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    (site_packages,) = environment.glob("lib/python*/site-packages")
    (site_packages / "packages.pth").write_text(f"{packages}\n")
    return environment / "bin" / "python"


def most_probable(log_probs: np.ndarray, num_tokens: int) -> list[int]:
    return log_probs[-num_tokens:].argmax(axis=-1).tolist()


def of_tokens(log_probs: np.ndarray, token_ids: list[int]) -> np.ndarray:
    return log_probs[np.arange(len(log_probs)), token_ids[1:]]


def check_first_steps(values: Executed, reference: Any) -> None:
    for prompt, tokens in values["greedy"]:
        assert most_probable(reference(prompt + tokens), len(tokens)) == tokens
    texts = values["texts"]
    assert values["streamed"] == texts[2]
    assert values["awaited"] == texts[:2]
    assert "the same beside another prompt: True" in values.text()
    assert len(set(values["samples"])) == 3
    vectors = np.array(values["vectors"])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=-1), 1, rtol=1e-5)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2]
    plan, metrics = values.shown("text/html")
    assert "executables ready" in plan
    assert "num_output_tokens" in metrics
    # 4.02 billion parameters of two bytes; eight requests of 512 tokens.
    assert "8.0 GB of parameters, and pages for 4,096 tokens" in values.text()


def check_what_the_engine_knows(values: Executed, reference: Any) -> None:
    prompt, tokens, log_probs = values["completion"]
    expected = of_tokens(reference(prompt + tokens), prompt + tokens)
    np.testing.assert_allclose(log_probs, expected[-len(tokens) :], atol=TOLERANCE)
    read, described = values["read"]
    np.testing.assert_allclose(described[1:], of_tokens(reference(read), read), atol=TOLERANCE)
    before, after, sampled = values["before"], values["forked"], values["sampled"]
    assert len(after) == 3
    assert after[0] == values["undisturbed"]
    assert all(tokens[: len(before)] == before for tokens in after)
    assert len({tuple(tokens) for tokens in after}) == 3
    assert sampled == after[0][: len(sampled)]
    assert values["rewound"][: len(sampled) - 4] == sampled[:-4]
    assert values["rewound"] != after[0]
    shown, timeline = values.shown("text/html")[1:]
    assert len(re.findall('title="', shown)) == len(tokens)
    assert len(re.findall('text-anchor="start"', timeline)) == 12
    assert len(re.findall(": queue,", timeline)) == 12
    assert len(re.findall(": decode,", timeline)) == 12


def check_structured_data(values: Executed, reference: Any) -> None:
    records, facts = values["records"], values["facts"]
    assert len(records) == len(facts) == 100
    for record in records:
        jsonschema.validate(record, values["schema"])
    assert set(values["reasons"]) == {"stop"}
    for field in values["schema"]["properties"]:
        num_right = sum(record[field] == fact[field] for record, fact in zip(records, facts, strict=True))
        assert f"{field:10} {num_right:3} of 100 right" in values.text()
    assert values["hit_rate"] > 0.5


def check_speculation(values: Executed, reference: Any) -> None:
    prompt, tokens = values["plain"]
    assert most_probable(reference(prompt + tokens), len(tokens)) == tokens
    assert values["drafted"] == values["predicted"] == tokens
    assert "equal log-probabilities: True" in values.text()
    # A slow moment of the machine may make drafts look too dear for a run, but not for all six.
    (num_accepted, num_drafted), (num_accepted_later, num_drafted_later) = values["counts"]
    assert num_accepted <= num_drafted
    assert 0 < num_accepted_later <= num_drafted_later
    assert f"{num_accepted} of {num_drafted} drafts were right" in values.text()


def check_batch_job(values: Executed, reference: Any) -> None:
    assert values["statuses"] == [0, -9, 0]
    assert 20 <= values["num_kept"] < 120
    folder = Path(values["folder"])
    undisturbed = (folder / "undisturbed.jsonl").read_bytes()
    assert [json.loads(line)["custom_id"] for line in undisturbed.splitlines()] == [f"request {i}" for i in range(120)]
    assert (folder / "out.jsonl").read_bytes() == undisturbed


def check_grpo(values: Executed, reference: Any) -> None:
    assert values["max_ulps"] == 0
    assert values["curve"][-1] > values["curve"][0] + 0.3
    # The engine has the trained parameters, which do as well after prompts that training has not seen.
    assert np.mean(values["rewards_of_others"]) > values["curve"][0] + 0.3
    assert len(values.shown("image/png")) == 1


TOKENS = "[list(c.prompt_token_ids), list(c.token_ids)]"
CHECKS = {
    "1_first_steps": (
        check_first_steps,
        {
            "greedy": f"[{TOKENS} for c in completions]",
            "texts": "[c.text for c in completions]",
            "samples": "[s.text for s in samples]",
            "streamed": "''.join(pieces)",
            "awaited": "[c.text for (c,) in answers]",
            "vectors": "vectors.tolist()",
        },
    ),
    "2_what_the_engine_knows": (
        check_what_the_engine_knows,
        {
            "completion": "[*(list(ids) for ids in (completion.prompt_token_ids, completion.token_ids)),"
            " completion.log_probs]",
            "read": "[read.prompt_token_ids, read.prompt_log_probs]",
            "before": "before",
            "forked": "[forked[i].token_ids for i in sorted(forked)]",
            "undisturbed": "llm.generate('def add(', params, show_progress=False)[0].token_ids",
            "sampled": "sampled",
            "rewound": "rewound.token_ids",
        },
    ),
    "3_structured_data": (
        check_structured_data,
        {
            "records": "records",
            "facts": "facts[2:]",
            "schema": "schema",
            "reasons": "[c.finish_reason for c in completions]",
            "hit_rate": "llm.metrics().prefix_hit_rate",
        },
    ),
    "4_speculation": (
        check_speculation,
        {
            "plain": f"[{TOKENS} for c in [plain]][0]",
            "drafted": "drafted.token_ids",
            "predicted": "predicted.token_ids",
            "counts": "[[m.num_accepted_tokens, m.num_drafted_tokens] for m in (metrics, llm.metrics())]",
        },
    ),
    "5_batch_job": (
        check_batch_job,
        {"statuses": "[status, killed_status, again_status]", "num_kept": "num_kept", "folder": "str(folder)"},
    ),
    "6_grpo": (
        check_grpo,
        {
            "max_ulps": "certificate.max_ulps",
            "curve": "curve",
            "rewards_of_others": "[reward(c.text) for c in llm.generate(others, [SamplingParams(n=8, max_tokens=20,"
            " stop='\\n', seed=6)] * 3, show_progress=False)]",
        },
    ),
}


@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path.stem not in OUTSIDE], ids=lambda path: path.stem)
def test_a_notebook_runs_and_its_results_hold(path, tmp_path, reference):
    check, expressions = CHECKS[path.stem]

    check(Executed(path, tmp_path, expressions), reference)


@pytest.mark.skipif(not builds() or find_spec("pip") is None, reason="pip or setuptools is missing or too old")
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_notebook_beside_a_wheel_installs_and_runs_it(name, wheel, python_without_jaxinfer, tmp_path, reference):
    folder = tmp_path / "folder"
    folder.mkdir()
    for path in (ROOT / "scripts" / "notebooks" / f"{name}.ipynb", wheel):
        shutil.copy(path, folder)
    check, expressions = CHECKS[name]
    module = "__import__('jaxinfer').__file__"

    values = Executed(folder / f"{name}.ipynb", folder, expressions | {"module": module}, python_without_jaxinfer)

    check(values, reference)
    assert Path(values["module"]).is_relative_to(tmp_path / "environment")
    assert not Path(values["module"]).is_relative_to(ROOT)
