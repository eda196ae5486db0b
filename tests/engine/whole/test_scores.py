"""Labels, scores and vectors by a checkpoint's own head are those of transformers, with the same bits in any batch."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

from jaxinfer.checkpoint import open_checkpoint
from jaxinfer.checkpoint.huggingface import NOT_DOWNLOADED
from jaxinfer.cli.models import describe
from jaxinfer.engine.async_llm import AsyncLLM
from jaxinfer.engine.engine import BUNDLED_MODEL
from jaxinfer.engine.frontend.embeddings import RERANKER_TEMPLATE
from jaxinfer.engine.llm import LLM
from jaxinfer.text.tokenizer import Tokenizer
from tests.checkpoint.renamed import edit_json
from tests.engine.engines import SIZES, SMALL, save_small_checkpoint
from tests.on_demand import steps_on_demand
from tests.oracles import load_reference, random_config, randomize

QUERY = "what is a fox?"
DOCUMENTS = ["an animal", "it is red, and it runs in the wood", "a word", "seven", "an animal that hunts mice"]
TEMPLATE = "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}="
PROMPTS = [f"[q]{QUERY}[d]{document}=" for document in DOCUMENTS]
QUIET: Any = {"show_progress": False}
ASKED: dict[str, Any] = {"chat_template": TEMPLATE, "answer_tokens": ("y", "n")}


def small_engine(path: Path, *, make: Any = LLM, **limits: Any) -> Any:
    with steps_on_demand():
        return make(path, **{**SMALL, **limits})


def ids_of(path: Path, text: str) -> torch.Tensor:
    tokenizer = Tokenizer.from_path(path)
    assert tokenizer is not None
    return torch.tensor([tokenizer.encode(text, add_special_tokens=False)])


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    return save_small_checkpoint(tmp_path_factory.mktemp("reranker"), family="qwen3")


@pytest.fixture(scope="module")
def reranking(reranker):
    with small_engine(reranker) as llm:
        yield llm


@pytest.fixture(scope="module")
def log_odds(reranker):
    """The difference of the logits of "y" and "n" after each prompt, by transformers."""
    model: Any = load_reference(reranker)
    yes, no = ids_of(reranker, "yn")[0]
    with torch.no_grad():
        logits = [model(ids_of(reranker, prompt)).logits[0, -1] for prompt in PROMPTS]
    return np.array([float(own[yes] - own[no]) for own in logits])


def save_classifier(path: Path, family: str, num_labels: int, **overrides: Any) -> Path:
    """Writes a random model with transformers' own classifier, and the characters as its vocabulary."""
    save_small_checkpoint(path, family=family, **overrides)
    labels = {i: f"label {i}" for i in range(num_labels)}
    config = random_config(family, **{**SIZES, "eos_token_id": 0, "pad_token_id": 0, "id2label": labels, **overrides})
    torch.manual_seed(1)
    model = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    randomize(model)
    (path / "model.safetensors").unlink()
    model.save_pretrained(path)
    return path


def label_logits(path: Path, prompts: list[str]) -> np.ndarray:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return np.array([model(ids_of(path, prompt)).logits[0].numpy() for prompt in prompts])


def test_a_language_model_scores_by_two_of_its_logits(reranking, log_odds):
    raw = reranking.score(QUERY, DOCUMENTS, **ASKED, activate=False, **QUIET)
    scores = reranking.score([QUERY] * 5, DOCUMENTS, **ASKED, **QUIET)

    assert scores.dtype == raw.dtype == np.float32
    assert np.abs(raw - log_odds).max() < 1e-4
    assert np.abs(scores - sigmoid(log_odds)).max() < 1e-5


@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 7}, {"max_num_seqs": 2}, {"prefix_cache": False}])
def test_a_score_has_the_same_bits_in_any_batch(reranker, reranking, limits):
    alone = [float(reranking.score(QUERY, document, **ASKED, **QUIET)[0]) for document in DOCUMENTS]

    with small_engine(reranker, **limits) as llm:
        together = llm.score(QUERY, DOCUMENTS, **ASKED, **QUIET)

    assert together.tolist() == alone


def test_one_answer_token_scores_by_its_logit_and_an_instruction_is_shown(reranker, reranking):
    model: Any = load_reference(reranker)
    prompt = ids_of(reranker, f"[s]choose[q]{QUERY}[d]seven=")
    with torch.no_grad():
        expected = model(prompt).logits[0, -1][ids_of(reranker, "y")[0, 0]].item()

    options = {**ASKED, "answer_tokens": ["y"], "instruction": "choose", "activate": False}
    assert reranking.score(QUERY, "seven", **options, **QUIET)[0] == pytest.approx(expected, abs=1e-4)


def test_new_parameters_score_anew(reranker, tmp_path):
    other = save_small_checkpoint(tmp_path, family="qwen3", seed=5)
    with small_engine(reranker) as llm, small_engine(other) as fresh:
        llm.score(QUERY, DOCUMENTS, **ASKED, **QUIET)
        with fresh.engine() as engine:
            params = engine.reader._params()
        llm.update_params(params)

        assert llm.score(QUERY, DOCUMENTS, **ASKED, **QUIET).tolist() == (
            fresh.score(QUERY, DOCUMENTS, **ASKED, **QUIET).tolist()
        )


FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "qwen3": {}, "mistral": {"sliding_window": 20}, "qwen3_moe": {}}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_classifier_has_the_logits_of_transformers(tmp_path, family):
    path = save_classifier(tmp_path, family, 3, **FAMILIES[family])
    expected = label_logits(path, PROMPTS)

    with small_engine(path) as llm:
        logits = llm.classify(PROMPTS, activate=False, **QUIET)
        probabilities = llm.classify(PROMPTS, **QUIET)
        assert llm.labels == ("label 0", "label 1", "label 2")
        assert "a classifier" in next(describe(str(path)))
        with pytest.raises(ValueError, match="a score is one number, and this classifier has 3 labels"):
            llm.score(QUERY, DOCUMENTS, **QUIET)
        with pytest.raises(ValueError, match=r"call LLM\.embed"):
            llm.generate(PROMPTS, **QUIET)

    assert np.abs(logits - expected).max() < 1e-4
    weights = np.exp(expected)
    assert np.abs(probabilities - weights / weights.sum(1, keepdims=True)).max() < 1e-5


@pytest.mark.parametrize(
    ("problem", "activated"),
    [(None, sigmoid), ("regression", lambda x: x), ("multi_label_classification", sigmoid)],
)
def test_a_classifier_of_one_label_scores_pairs(tmp_path, problem, activated):
    path = save_classifier(tmp_path, "llama", 1)
    edit_json(path, problem_type=problem)
    expected = label_logits(path, PROMPTS)[:, 0]

    with small_engine(path) as llm:
        scores = llm.score(QUERY, DOCUMENTS, chat_template=TEMPLATE, **QUIET)
        with pytest.raises(ValueError, match="answer_tokens cannot be honoured: the classifier"):
            llm.score(QUERY, DOCUMENTS, **ASKED, **QUIET)

    assert np.abs(scores - activated(expected)).max() < 1e-4


def test_several_labels_that_may_hold_together_are_probabilities_each(tmp_path):
    path = save_classifier(tmp_path, "llama", 2)
    edit_json(path, problem_type="multi_label_classification")

    with small_engine(path) as llm:
        assert np.abs(llm.classify(PROMPTS, **QUIET) - sigmoid(label_logits(path, PROMPTS))).max() < 1e-4


def with_modules(path: Path, modules: dict[str, dict[str, Any]]) -> Path:
    """Writes modules of sentence-transformers beside a checkpoint, each with its config.json."""
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for i, (kind, config) in enumerate(modules.items(), 1):
        name = kind.split()[0]
        place = f"{i}_{name}"
        listed.append({"idx": i, "name": str(i), "path": place, "type": f"sentence_transformers.models.{name}"})
        (path / place).mkdir()
        (path / place / "config.json").write_text(json.dumps(config))
        if name == "Dense":
            torch.manual_seed(i)
            tensors = {"linear.weight": torch.randn(config["out_features"], config["in_features"]) / 5}
            if config["bias"]:
                tensors["linear.bias"] = torch.randn(config["out_features"])
            safetensors.torch.save_file(tensors, path / place / "model.safetensors")
    (path / "modules.json").write_text(json.dumps(listed))
    return path


MEAN = {"word_embedding_dimension": 144, "pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}
WIDE = {
    "in_features": 144,
    "out_features": 200,
    "bias": False,
    "activation_function": "torch.nn.modules.linear.Identity",
}
NARROW = {
    "in_features": 200,
    "out_features": 24,
    "bias": True,
    "activation_function": "torch.nn.modules.activation.Tanh",
}


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    path = save_small_checkpoint(tmp_path_factory.mktemp("embedder"), family="qwen3", tie_word_embeddings=False)
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    del tensors["lm_head.weight"]
    safetensors.torch.save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return with_modules(path, {"Pooling": MEAN, "Dense a": WIDE, "Dense b": NARROW, "Normalize": {}})


def vectors_of(path: Path, texts: list[str]) -> np.ndarray:
    """Returns what torch makes of the mean state of each text."""
    model: Any = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    dense = [safetensors.torch.load_file(path / place / "model.safetensors") for place in ("2_Dense", "3_Dense")]
    vectors = []
    with torch.no_grad():
        for text in texts:
            x = model(ids_of(path, text)).last_hidden_state[0].mean(0)
            x = torch.nn.functional.linear(x, dense[0]["linear.weight"])
            x = torch.tanh(torch.nn.functional.linear(x, dense[1]["linear.weight"], dense[1]["linear.bias"]))
            vectors.append(torch.nn.functional.normalize(x, dim=0).numpy())
    return np.array(vectors)


def test_vectors_are_those_of_the_modules_beside_the_checkpoint(embedder):
    expected = vectors_of(embedder, DOCUMENTS)

    with small_engine(embedder) as llm:
        vectors = llm.embed(DOCUMENTS, **QUIET)
        raw = llm.embed(DOCUMENTS, pooling="last", **QUIET)

    assert vectors.shape == (5, 24)
    assert np.abs(vectors - expected).max() < 1e-5
    assert raw.shape == (5, 144)


def test_an_embedding_model_scores_by_cosines(embedder):
    query, *documents = vectors_of(embedder, [QUERY, *DOCUMENTS])

    with small_engine(embedder) as llm:
        scores = llm.score(QUERY, DOCUMENTS, **QUIET)
        with pytest.raises(ValueError, match="instruction='a' cannot be honoured: this checkpoint is an"):
            llm.score(QUERY, DOCUMENTS, instruction="a", **QUIET)

    assert np.abs(scores - np.array(documents) @ query).max() < 1e-5


def test_the_answer_tokens_may_stand_beside_the_checkpoint(tmp_path, log_odds):
    path = save_small_checkpoint(tmp_path, family="qwen3")
    yes, no = ids_of(path, "yn")[0].tolist()
    with_modules(path, {"LogitScore": {"true_token_id": yes, "false_token_id": no}})

    assert open_checkpoint(path).head.answer_tokens == (yes, no)
    with small_engine(path) as llm:
        assert (
            np.abs(llm.score(QUERY, DOCUMENTS, chat_template=TEMPLATE, activate=False, **QUIET) - log_odds).max() < 1e-4
        )


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({"Pooling": {"pooling_mode_cls_token": True}}, "pools by cls_token, and only mean or lasttoken"),
        ({"Pooling": {**MEAN, "pooling_mode_lasttoken": True}}, "pools by lasttoken, mean, and only"),
        ({"Pooling": {**MEAN, "include_prompt": False}}, "include_prompt=false"),
        ({"Pooling": {"pooling_mode": "max"}}, "pools by max"),
        ({"LayerNorm": {}}, "the module 'LayerNorm', and only Transformer, Pooling"),
        ({"Dense": {**WIDE, "activation_function": "torch.nn.modules.activation.Mish"}}, "activation_function='Mish'"),
        ({"Dense": {**WIDE, "out_features": 100, "in_features": 7}}, "in_features=7 does not take the 144 numbers"),
        ({"LogitScore": {"true_token_id": "yes"}}, "true_token_id='yes' and false_token_id=None are no tokens"),
        ({"LogitScore": {"true_token_id": 96}}, r"the answer tokens \[96\] are none of the model's 96"),
    ],
)
def test_modules_that_cannot_be_honoured_are_refused_by_name(reranker, tmp_path, modules, message):
    for file in reranker.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with_modules(tmp_path, modules)

    with small_engine(tmp_path) as llm:
        with pytest.raises(ValueError, match=message):
            llm.score(QUERY, DOCUMENTS, chat_template=TEMPLATE, **QUIET)
        assert llm.embed(DOCUMENTS, pooling="mean", **QUIET).shape == (5, 144)


@pytest.mark.parametrize(
    "content", ["{}", "[1]", '[{"type": "a.Pooling", "path": "../x"}]', "[", '[{"type": 1, "path": ""}]']
)
def test_damaged_modules_are_refused_with_their_file(reranker, tmp_path, content):
    for file in reranker.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "modules.json").write_text(content)

    with pytest.raises(ValueError, match=r"modules\.json is no list of up to 100 modules"):
        _ = open_checkpoint(tmp_path).head


WRONG = {
    "pairs": ({"queries": ["a", "b"], "documents": ["c"]}, "2 queries do not go with 1 documents"),
    "no document": ({"documents": []}, "documents"),
    "no text": ({"documents": [3]}, "documents"),
    "template": (
        {"chat_template": "{{ messages[0].content }}"},
        "does not show the messages of roles query and document",
    ),
    "no template": ({"chat_template": None}, "says in no chat template how it reads a query and a document"),
    "answers": ({"answer_tokens": ("yes", "no")}, r"answer_tokens=\('yes', 'no'\) are not a token each"),
    "too many": ({"answer_tokens": ("a", "b", "c")}, "answer_tokens"),
    "long": ({"documents": ["a" * 99]}, "prompt 0"),
}


@pytest.mark.parametrize(("given", "message"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_scored_is_refused(reranking, given, message):
    arguments = {"queries": "a", "documents": ["b"], **ASKED, **given}

    with pytest.raises(ValueError, match=message):
        reranking.score(arguments.pop("queries"), arguments.pop("documents"), **arguments, **QUIET)

    assert not reranking.has_unfinished


def test_a_language_model_has_no_labels(reranking):
    assert reranking.labels == ()
    with pytest.raises(ValueError, match="this checkpoint has no classifier; use one whose architecture ends in"):
        reranking.classify(PROMPTS, **QUIET)


def test_a_classifier_needs_its_weight_in_its_shape(tmp_path):
    path = save_classifier(tmp_path, "llama", 3)
    edit_json(path, id2label={"0": "a", "1": "b"})

    with small_engine(path) as llm, pytest.raises(ValueError, match=r"score\.weight of shape \(2, 144\)"):
        llm.classify(PROMPTS, **QUIET)


def test_the_template_of_rerankers_is_the_published_one():
    tokenizer = Tokenizer.from_path(BUNDLED_MODEL)
    assert tokenizer is not None
    messages = [{"role": "query", "content": "Which?"}, {"role": "document", "content": "This.\n"}]

    def shown(*system: dict[str, str]) -> str:
        text = tokenizer.apply_chat_template([*system, *messages], chat_template=RERANKER_TEMPLATE, tokenize=False)
        assert isinstance(text, str)
        return text

    before = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct"
        ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    after = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    usual = "Given a web search query, retrieve relevant passages that answer the query"
    for instruction, system in ((usual, ()), ("Find it", ({"role": "system", "content": "Find it"},))):
        asked = f"<Instruct>: {instruction}\n<Query>: Which?\n<Document>: This.\n"
        assert shown(*system) == before + asked + after


def test_the_template_of_a_checkpoint_that_knows_the_roles_is_taken(tmp_path, reranking):
    path = save_small_checkpoint(tmp_path, family="qwen3")
    template = "{% for m in messages if m.role == 'query' or m.role == 'document' %}[{{ m.role[0] }}]{{ m.content }}"
    (path / "chat_template.jinja").write_text(template + "{% endfor %}=")

    with small_engine(path) as llm:
        scores = llm.score(QUERY, DOCUMENTS, answer_tokens=("y", "n"), **QUIET)

    assert scores.tolist() == reranking.score(QUERY, DOCUMENTS, **ASKED, **QUIET).tolist()


def test_async_scores_are_the_same(reranker, reranking):
    async def score() -> np.ndarray:
        async with small_engine(reranker, make=AsyncLLM) as llm:
            return await llm.score(QUERY, DOCUMENTS, **ASKED)

    assert asyncio.run(score()).tolist() == reranking.score(QUERY, DOCUMENTS, **ASKED, **QUIET).tolist()


def test_the_folders_of_modules_are_downloaded():
    from huggingface_hub.utils import filter_repo_objects

    files = [
        "1_Pooling/config.json",
        "2_Dense/model.safetensors",
        "onnx/model.json",
        "4bit/config.json",
        "modules.json",
    ]
    taken = list(filter_repo_objects(files, allow_patterns=["*.json", "*.safetensors"], ignore_patterns=NOT_DOWNLOADED))

    assert taken == ["1_Pooling/config.json", "2_Dense/model.safetensors", "modules.json"]
