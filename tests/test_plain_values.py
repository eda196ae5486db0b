"""Values of NumPy, JAX, PyTorch, PyArrow and pandas as values of Python, alone and in every configuration."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from jaxinfer.config import CacheConfig, EngineConfig, Parallelism, SamplingParams
from jaxinfer.model.components.mlp import MLP
from jaxinfer.plain_values import is_missing, plain, plain_mapping
from jaxinfer.validation import as_bool, as_ints, as_tuple

TABLE = {"role": ["user", "assistant"], "number": [1, 2]}
ROWS = [{"role": "user", "number": 1}, {"role": "assistant", "number": 2}]
SCALARS = [
    (np.int64(5), 5),
    (np.uint8(5), 5),
    (np.float64(0.5), 0.5),
    (np.float32(0.5), 0.5),
    (np.True_, True),
    (np.str_("é"), "é"),
    (np.array(5), 5),
    (np.array("é"), "é"),
    (jnp.int32(5), 5),
    (jnp.bool_(False), False),
    (torch.tensor(0.5), 0.5),
    (torch.tensor(True), True),
    (pa.scalar(5), 5),
    (pa.scalar(0.5), 0.5),
    (pa.scalar(True), True),
    (pa.scalar("é"), "é"),
    (pa.scalar(None, pa.string()), None),
    (pd.Series([True])[0], True),
    (pd.Series([1], dtype="Int8")[0], 1),
    (pd.Series(["é"], dtype="category")[0], "é"),
]
LISTS = [
    (np.arange(3), [0, 1, 2]),
    (np.array([["a", "b"]]), [["a", "b"]]),
    (np.array([True, False]), [True, False]),
    (jnp.arange(3), [0, 1, 2]),
    (torch.arange(3), [0, 1, 2]),
    (torch.ones(2, dtype=torch.bfloat16), [1.0, 1.0]),
    (torch.ones(2, requires_grad=True), [1.0, 1.0]),
    (pa.array([1, None]), [1, None]),
    (pa.array(["a", "é"]), ["a", "é"]),
    (pa.array(["a", "a"]).dictionary_encode(), ["a", "a"]),
    (pa.chunked_array([["a"], ["b"]]), ["a", "b"]),
    (pa.array([[1, 2], [3]]), [[1, 2], [3]]),
    (pa.scalar([1, 2]), [1, 2]),
    (pa.scalar(ROWS), ROWS),
    (pd.Series([1, 2]), [1, 2]),
    (pd.Series([1, 2], dtype="Int64"), [1, 2]),
    (pd.Series(["a", "é"], index=[7, 8]), ["a", "é"]),
    (pd.Series(["a"], dtype="string[pyarrow]"), ["a"]),
    (pd.Series(["a", "b"], dtype="category"), ["a", "b"]),
    (pd.Index([1, 2]), [1, 2]),
    (pd.array([True, False]), [True, False]),
    (pd.DataFrame(TABLE), ROWS),
    (pa.table(TABLE), ROWS),
    (pa.RecordBatch.from_pylist(ROWS), ROWS),
]


def types_of(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: types_of(item) for key, item in value.items()}
    return [types_of(item) for item in value] if isinstance(value, list) else type(value)


@pytest.mark.parametrize(("value", "expected"), [*SCALARS, *LISTS], ids=lambda value: type(value).__name__)
def test_a_value_of_another_library_becomes_one_of_python(value, expected):
    assert plain(value) == expected
    assert types_of(plain(value)) == types_of(expected)


@pytest.mark.parametrize(
    "value", [5, "a", None, [np.int64(5)], {"a": 1}, b"ab", memoryview(b"ab"), Fraction(1, 2), np.ndarray, pd.NA, max]
)
def test_any_other_value_stays_as_it_is(value):
    assert plain(value) is value


def test_a_row_of_a_table_is_a_mapping():
    frame = pd.DataFrame(TABLE)
    assert plain_mapping(frame.iloc[1]) == ROWS[1]
    assert plain_mapping(pa.scalar(ROWS[1])) == ROWS[1]
    assert plain_mapping(frame) == ROWS
    assert plain_mapping(ROWS[1]) is ROWS[1]


@pytest.mark.parametrize(
    "value",
    [
        None,
        math.nan,
        np.float64("nan"),
        pd.NA,
        pd.NaT,
        pd.Series(["a", None])[1],
        pd.Series([1, None], dtype="Int8")[1],
    ],
    ids=repr,
)
def test_a_missing_value_of_a_column_is_known_as_one(value):
    assert is_missing(value)


@pytest.mark.parametrize("value", [0, "", False, 0.0, math.inf, [], Decimal(0), np.str_("nan")], ids=repr)
def test_an_empty_value_is_not_missing(value):
    assert not is_missing(value)


def test_no_library_is_imported_for_its_values():
    code = "import jaxinfer.config, sys; print({'numpy', 'jax', 'pandas', 'pyarrow'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


# A value for each field of a configuration; a test below says that none is left out.
SAMPLING = {
    **{"n": 2, "best_of": 3, "max_tokens": 3, "min_tokens": 2, "top_k": 2, "no_repeat_ngram_size": 2, "seed": 2**63},
    **{"sample_index": 3, "thinking_token_budget": 4},
    **{"temperature": 0.5, "top_p": 0.25, "min_p": 0.125, "typical_p": 0.5, "repetition_penalty": 1.5},
    **{"presence_penalty": -0.5, "frequency_penalty": 0.25, "log_probs": 4, "prompt_log_probs": 3},
    **{"ignore_eos": True, "skip_special_tokens": False, "regex": "[0-9]+", "grammar": 'start: "a"'},
    **{"stop": ["x", "é"], "stop_token_ids": [6, 7], "bad_words": [[6, 7], [8, 9]], "allowed_token_ids": [9, 5]},
    **{"choices": ["yes", "no"], "json_schema": {"enum": [1, 2]}},
    **{"logit_bias": {7: -1.0, 5: 2.5}, "logits_processors": {"a": 1.5}},
}
ENGINE = {
    **{"max_num_seqs": 3, "max_num_batched_tokens": 64, "max_model_len": 96, "num_sink_tokens": 16, "page_size": 16},
    **{"num_pages": 8, "memory_bytes": 2**31, "cache_bytes": 2**30, "max_samples": 3, "max_log_probs": 3},
    **{"max_prompt_log_probs": 3, "max_listed_tokens": 3, "prefix_cache": True, "decode_loop_steps": 2},
    **{"sampling_log_probs": True, "cache_dtype": "fp8"},
    **{"max_mixed_tokens": 32, "max_waiting": 3, "host_cache_bytes": 2**20, "disk_cache_bytes": 2**20},
    **{"disk_cache_path": "pages", "max_drafts": 3, "adaptive_drafts": False, "draft_trees": True},
    **{"ttft_target": 0.5, "tpot_target": 0.25, "quantization": "int8", "attention": "reference"},
    **{"max_adapters": 2, "max_adapter_rank": 8, "exact": True},
    "parallelism": Parallelism(tensor=2),
}
CACHE = {
    **{"num_pages": 3, "page_size": 16, "dtype": "float32", "open_dtype": "bfloat16"},
    **{"num_bounded_pages": [2, 3], "num_draft_states": 1},
}
CONFIGS: list[tuple[Any, dict[str, Any]]] = [
    *((SamplingParams, SAMPLING), (EngineConfig, ENGINE), (CacheConfig, CACHE)),
    (Parallelism, {"tensor": 2, "experts": 3, "replicas": 4, "prefill": 1, "stages": 2}),
]
CASES = [(config, name, value) for config, values in CONFIGS for name, value in values.items()]

# Other fields that a field needs.
BASES: dict[str, dict[str, Any]] = {
    "disk_cache_path": {"disk_cache_bytes": 2**20},
    "disk_cache_bytes": {"disk_cache_path": "pages"},
    "prefill": {"replicas": 4},
}


def _in_pandas(value: Any) -> Any:
    if isinstance(value, dict):
        return value if "enum" in value else pd.Series(value)
    return pd.Series(value) if isinstance(value, list) else pd.Series([value])[0]


def _in_arrow(value: Any) -> Any:
    if isinstance(value, dict):
        has_texts = all(isinstance(key, str) for key in value)
        return pa.scalar(value) if has_texts else {pa.scalar(k): pa.scalar(v) for k, v in value.items()}
    return pa.array(value) if isinstance(value, list) else pa.scalar(value, pa.uint64() if value == 2**63 else None)


def _in_numpy(value: Any) -> Any:
    if isinstance(value, dict):
        return {_in_numpy(key): _in_numpy(item) for key, item in value.items()}
    return np.array(value) if isinstance(value, list) else np.array(value)[()]


def _one_by_one(value: Any) -> Any:
    """Lists of Python with items of PyArrow."""
    if isinstance(value, list):
        return [pa.array(item) if isinstance(item, list) else pa.scalar(item) for item in value]
    return value if isinstance(value, dict) else np.array(value)


LIBRARIES: list[Callable[[Any], Any]] = [_in_numpy, _in_arrow, _in_pandas, _one_by_one]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("config", "name", "value"), CASES, ids=[f"{c.__name__}.{n}" for c, n, _ in CASES])
def test_each_field_takes_the_values_of_other_libraries(config, name, value, library):
    base = BASES.get(name, {}) | ({"num_pages": 3} if config is CacheConfig else {})
    base = {key: item for key, item in base.items() if key != name}
    expected = config(**base, **{name: value})

    other: Any = value if dataclasses.is_dataclass(value) else library(value)
    made = config(**base, **{name: other})

    assert made == expected
    assert repr(made) == repr(expected)  # no np.int64(5) is left


def test_no_field_is_left_out_of_the_test_above():
    for config, values in CONFIGS:
        assert set(values) == {field.name for field in dataclasses.fields(config)}


@pytest.mark.parametrize("true", [np.True_, pa.scalar(True), np.array(True), jnp.bool_(True), torch.tensor(True)])
def test_a_flag_takes_a_truth_value_of_any_library(true):
    assert as_bool("flag", true) is True
    assert MLP(intermediate_size=8, has_bias=true).has_bias


@pytest.mark.parametrize("value", [1, "True", None, np.int64(1), pd.NA, np.array([True]), pa.scalar(None, pa.bool_())])
def test_a_flag_takes_nothing_else(value):
    with pytest.raises(ValueError, match=r"^flag=.* is not allowed: flag must be True or False$"):
        as_bool("flag", value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (np.nan, pd.NA, pa.scalar(None, pa.float32()), np.array([0.5]))),
        *(("max_tokens", value) for value in (np.nan, np.float64(5), pd.NA, np.True_, pd.Series([5]))),
        *(("stop_token_ids", value) for value in (pd.Series([5, None]), pa.array([5, None]), np.array([0.5]))),
        *(("stop", value) for value in (pd.Series(["a", None]), pa.array([None], pa.string()), np.array([1]))),
        *(("logit_bias", value) for value in (pd.Series({5: np.nan}), {5: pd.NA}, pd.Series([[5, None]]))),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_missing_or_wrong_value_is_refused_by_its_field(name, value):
    with pytest.raises(ValueError, match=f"(?s)^{name}=.* is not allowed: {name} must be"):
        SamplingParams(**{name: value})


def test_items_of_any_iterable_are_converted():
    assert as_tuple("values", (pa.scalar(i) for i in (1, 2)), "numbers") == (1, 2)
    assert as_ints("values", pd.Series([1, 2], dtype="Int64")) == (1, 2)
    assert as_ints("values", {np.int8(5)}) == (5,)


def test_a_value_that_its_library_cannot_convert_is_refused_by_name():
    with pytest.raises(ValueError, match=r"^stop_token_ids=tensor.* is not allowed: it cannot be read"):
        SamplingParams(stop_token_ids=torch.ones(2, device="meta"))  # pyright: ignore
