"""What a checkpoint computes from the hidden states of a text: vectors, labels or scores, beside its decoder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.checkpoint.config_json.family import is_classifier
from jaxinfer.checkpoint.config_json.fields import require_count
from jaxinfer.checkpoint.huggingface import MAX_JSON_BYTES, read_json
from jaxinfer.checkpoint.safetensors_file import DTYPES, StoredTensor, read_header
from jaxinfer.checkpoint.stored import Stored
from jaxinfer.validation import MAX_INT, is_int, shown

MODULES_FILE = "modules.json"  # of embedding models and rerankers, by sentence-transformers
CLASSIFIER_WEIGHT = "score.weight"
MAX_MODULES = 100

POOLINGS = {"mean": "mean", "lasttoken": "last", "last": "last"}  # by the names of sentence-transformers


def sigmoid(x: np.ndarray) -> np.ndarray:
    # exp of a number below 0 alone does not overflow.
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small))


ACTIVATIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
    "Sigmoid": sigmoid,
}


@dataclass(frozen=True, eq=False)
class Dense:
    """A product of a vector f32[I]: activation(weight f32[O, I] @ x + bias f32[O])."""

    weight: np.ndarray
    bias: np.ndarray | None = None
    activation: str = "Identity"

    def __call__(self, x: np.ndarray) -> np.ndarray:
        y = self.weight @ x  # one vector at a time: its bits do not depend on the others
        return ACTIVATIONS[self.activation](y if self.bias is None else y + self.bias)


@dataclass(frozen=True, kw_only=True, eq=False)
class StateHead:
    """The part of a checkpoint behind its decoder.

    * `pooling`: which state of a text is taken, "last", or "mean" of all; `dense` products follow.
    * `classifier`: the product that gives the logits of labels; `labels` are their names. None: there is none.
    * `problem`: of a classifier, the `problem_type` of config.json, if it states one.
    * `answer_tokens`: the token that says that a document fits a query, and the one that says that it does not, None if
      the model was trained with the first one alone; None: the checkpoint states none.
    """

    pooling: str = "last"
    dense: tuple[Dense, ...] = ()
    classifier: Dense | None = None
    labels: tuple[str, ...] = ()
    problem: str | None = None
    answer_tokens: tuple[int, int | None] | None = None

    def vector(self, pooled: np.ndarray) -> np.ndarray:
        """Returns the vector f32[O] of a text for its pooled state f32[D]."""
        for product in self.dense:
            pooled = product(pooled)
        return pooled

    def activated(self, logits: np.ndarray) -> np.ndarray:
        """Returns the logits f32[n, labels] of a classifier as numbers from 0 to 1, as its training understood them.

        Several labels of which one holds add up to 1. A regression stays as it is.
        """
        if self.problem == "regression":
            return logits
        if self.problem == "multi_label_classification" or logits.shape[1] == 1:
            return sigmoid(logits)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        return weights / weights.sum(axis=1, keepdims=True)


def read_state_head(
    folder: Path, hf: Mapping[str, Any], stored: Callable[[], Mapping[str, Stored]], hidden_size: int
) -> StateHead:
    """Returns the head that a folder's files describe; the last state alone, if they describe none.

    `hf`: the contents of config.json; `stored` returns the checkpoint's tensors. Raises ValueError for a head that is
    damaged or cannot be honoured.
    """
    if is_classifier(hf):
        return _read_classifier(hf, stored(), hidden_size)
    options: dict[str, Any] = {}
    dense: list[Dense] = []
    for kind, place in _read_modules(folder):
        if kind == "Pooling":
            options["pooling"] = _read_pooling(place)
        elif kind == "Dense":
            dense.append(_read_dense(place, dense[-1].weight.shape[0] if dense else hidden_size))
        elif kind == "LogitScore":
            options["answer_tokens"] = _read_answer_tokens(place / "config.json")
        elif kind not in ("Transformer", "Normalize"):  # the caller of `embed` says if vectors have length 1
            known = "Transformer, Pooling, Dense, Normalize and LogitScore"
            raise ValueError(
                f"{folder / MODULES_FILE} has the module {shown(kind)}, and only {known} are read; give `pooling` to"
                " `embed`, which then computes no module"
            )
    return StateHead(dense=tuple(dense), **options)


def _read_modules(folder: Path) -> list[tuple[str, Path]]:
    """Returns the kind and the folder of each module of sentence-transformers; [] without any."""
    file = folder / MODULES_FILE
    if not file.is_file():
        return []
    try:
        modules = None if file.stat().st_size > MAX_JSON_BYTES else json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        modules = None
    if not isinstance(modules, list) or len(modules) > MAX_MODULES:
        modules = [None]
    found = []
    for module in modules:
        kind, place = (module.get("type"), module.get("path")) if isinstance(module, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(place, str) or Path(place).name != place.rstrip("/"):
            raise ValueError(
                f"{file} is no list of up to {MAX_MODULES} modules, each with a type and the path of a folder beside"
                " it; download it again"
            )
        found.append((kind.rpartition(".")[2], folder / place))
    return found


def _read_pooling(place: Path) -> str:
    file = place / "config.json"
    stated = read_json(file)
    mode = stated.get("pooling_mode")
    switched_on = {key for key, is_on in stated.items() if key.startswith("pooling_mode_") and is_on}
    modes = {mode} if isinstance(mode, str) else switched_on
    names = {name.removeprefix("pooling_mode_").removesuffix("_tokens") for name in modes}
    pooling = {POOLINGS.get(name) for name in names}
    if len(pooling) != 1 or None in pooling:
        raise ValueError(
            f"{file} pools by {', '.join(sorted(names)) or 'nothing'}, and only mean or lasttoken alone are read; give"
            " `pooling` to `embed`, which then computes no module"
        )
    if stated.get("include_prompt", True) is not True and pooling == {"mean"}:
        raise ValueError(
            f"{file} leaves the tokens of an instruction out of the mean (include_prompt=false), and `embed` does not"
            " know which these are; give `pooling` to `embed`, which then computes no module"
        )
    return str(pooling.pop())


def _read_dense(place: Path, num_inputs: int) -> Dense:
    file = place / "config.json"
    stated = read_json(file)
    activation = str(stated.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(
            f"{file} has activation_function={shown(activation)}, and only {known} are read; give `pooling` to `embed`,"
            " which then computes no module"
        )
    weights = place / "model.safetensors"
    if not weights.is_file():
        raise ValueError(f"{place} has no {weights.name}, which its config.json describes; download the folder again")
    tensors = read_header(weights)
    shape = (stated.get("out_features"), stated.get("in_features"))
    weight = _floats(weights, tensors, "linear.weight", shape)
    if weight.shape[1] != num_inputs:
        raise ValueError(f"{file}: in_features={shape[1]} does not take the {num_inputs} numbers before it")
    has_bias = stated.get("bias", True) is True
    bias = _floats(weights, tensors, "linear.bias", shape[:1]) if has_bias else None
    return Dense(weight, bias, activation)


def _read_answer_tokens(file: Path) -> tuple[int, int | None]:
    stated = read_json(file)
    true: Any = stated.get("true_token_id")
    false = stated.get("false_token_id")
    if not _is_token(true) or not (false is None or _is_token(false)):
        raise ValueError(
            f"{file}: true_token_id={true!r} and false_token_id={false!r} are no tokens; download it again"
        )
    return true, false


def _is_token(value: Any) -> bool:
    return is_int(value) and 0 <= value <= MAX_INT


def _read_classifier(hf: Mapping[str, Any], stored: Mapping[str, Stored], hidden_size: int) -> StateHead:
    names = hf.get("id2label")
    if names is None:
        names = {str(i): f"LABEL_{i}" for i in range(require_count(hf, "num_labels", 2))}
    try:
        labels = tuple(str(names[str(i)]) for i in range(len(names)))
    except (KeyError, TypeError):
        raise ValueError(f"id2label={shown(names)} is no table of labels by number; correct config.json") from None
    problem = hf.get("problem_type")
    kinds = ("regression", "single_label_classification", "multi_label_classification")
    if problem not in (None, *kinds):
        raise ValueError(f"problem_type={shown(problem)} is not one of {', '.join(kinds)}; correct config.json")
    weight = _floats("the checkpoint", stored, CLASSIFIER_WEIGHT, (len(labels), hidden_size))
    return StateHead(classifier=Dense(weight), labels=labels, problem=problem)


def _floats(where: Any, tensors: Mapping[str, Any], name: str, shape: Sequence[Any]) -> np.ndarray:
    """Returns a tensor in float32; ValueError if it is not there in this shape."""
    tensor = tensors.get(name)
    if not isinstance(tensor, StoredTensor) or tensor.shape != tuple(shape) or tensor.dtype not in DTYPES:
        found = "none" if tensor is None else f"one of shape {getattr(tensor, 'shape', '?')}"
        raise ValueError(f"{where} needs a floating-point {name} of shape {tuple(shape)}, and has {found}; download it")
    return np.asarray(tensor.map(), np.float32)
