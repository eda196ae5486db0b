"""Saves a request to a file, from which another process continues it with the same tokens.

digest, 32 bytes | length of the head, 8 bytes | head, JSON | pages, one after another, kind by kind
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.atomic_file import read_checked, remove_orphans, write_checked
from jaxinfer.engine.frontend.admission import Admission
from jaxinfer.engine.frontend.page_identity import DEVICES
from jaxinfer.engine.kv_cache.page_transfers import Content
from jaxinfer.engine.request.request import Request, SharedPrompt
from jaxinfer.sampling_params import params_of

KIND = "request of jaxinfer, 7"
LENGTH_BYTES = 8


def write_request(
    path: Path,
    request: Request,
    time_limit: float,
    pages: Sequence[Mapping[int, Content]],
    num_saved: int,
    identity: dict,
) -> None:
    """Writes a request and its `pages`, the contents by page index, for each kind of pages.

    `time_limit`: seconds left until its deadline. `num_saved`: the number of its tokens with keys and values in pages.
    """
    head = {
        "kind": KIND,
        "identity": identity,
        "prompt": request.token_ids[: request.num_prompt_tokens],
        "prompt_log_probs": request.shared_prompt.prompt_log_probs,
        "prompt_top_log_probs": [list(tops.items()) for tops in request.shared_prompt.prompt_top_log_probs],
        "outputs": [(token, log_prob, list(tops.items()), *rest) for token, log_prob, tops, *rest in request.outputs],
        "sampling": asdict(request.sampling),
        "seed": request.seed,
        "sample_index": request.sample_index,
        "num_samples": request.shared_prompt.num_samples,
        "terms": {
            "priority": request.priority,
            "tenant": request.tenant,
            "deadline": None if time_limit == math.inf else max(time_limit, 1e-3),  # the deadline may just have passed
            "cache_salt": request.cache_salt,
        },
        "adapter": None
        if request.adapter is None
        else {"name": request.adapter.name, "digest": request.adapter.digest},
        "pages": [{"indices": list(some), "size": sum(c.nbytes for c in some.values())} for some in pages],
        "num_saved": num_saved,
    }
    encoded = json.dumps(head).encode()
    _require_file(path)
    remove_orphans(path.parent, re.escape(path.name))
    contents = chain.from_iterable(some.values() for some in pages)
    write_checked(path, [len(encoded).to_bytes(LENGTH_BYTES, "little"), encoded, *contents])


def read_request(path: Path, request_id: int, admission: Admission, identity: dict[str, str]) -> Request:
    """Returns the request in a file; ValueError with the reason if it is damaged or cannot continue here."""
    _require_file(path)
    sealed = read_checked(path)
    start = LENGTH_BYTES + int.from_bytes(sealed[:LENGTH_BYTES], "little")
    try:
        head: dict[str, Any] = json.loads(bytes(sealed[LENGTH_BYTES:start]))
        kind = head["kind"]
    except (ValueError, KeyError, TypeError):
        kind = None
    if kind != KIND:
        raise ValueError(f"{path} is not a {KIND}; give a file that LLM.save has written with this version")
    for aspect, here in identity.items():
        if head["identity"][aspect] != here and aspect != DEVICES:
            raise ValueError(
                f"{path} was saved with {aspect}={head['identity'][aspect]!r}, here it is {here!r}: its pages would be"
                " wrong; restore it with an LLM like the one that saved it"
            )
    request = _rebuild(path, head, request_id, admission)
    kinds = []
    for some in head["pages"]:
        contents = np.frombuffer(sealed[start : start + some["size"]], np.uint8)
        contents = contents.reshape(len(some["indices"]), -1) if some["indices"] else ()
        kinds.append(dict(zip(some["indices"], contents, strict=True)))
        start += some["size"]
    if any(kinds) and head["identity"][DEVICES] == identity[DEVICES]:
        request.table.saved, request.table.num_saved = kinds, head["num_saved"]
    return request


def _require_file(path: Path) -> None:
    """Raises ValueError for a folder or a device; reading a device may never end, and writing would replace it."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no regular file; give the path of one, or of none yet")


def _find_adapter(path: Path, saved: dict[str, str] | None, admission: Admission) -> str | None:
    """Returns the name here of the adapter that a request was saved with."""
    if saved is None:
        return None
    if (adapter := admission.adapters.of_digest(saved["digest"])) is None:
        raise ValueError(
            f"{path} was saved with the adapter {saved['name']!r}, and none with the same contents (digest"
            f" {saved['digest']}) is loaded here; load it by load_adapter first"
        )
    return adapter.name


def _rebuild(path: Path, head: dict[str, Any], request_id: int, admission: Admission) -> Request:
    sampling = params_of(head["sampling"])
    adapter = _find_adapter(path, head["adapter"], admission)
    (request,) = admission.admit(count(request_id), head["prompt"], sampling, adapter=adapter, **head["terms"])
    request.seed, request.sample_index = head["seed"], head["sample_index"]
    tops = [dict(map(tuple, pairs)) for pairs in head["prompt_top_log_probs"]]
    request.shared_prompt = SharedPrompt(head["num_samples"], head["prompt_log_probs"], tops)
    describes_draws = admission.engine_config.sampling_log_probs
    for token_id, log_prob, tops, sampling_log_prob in head["outputs"]:
        if (sampling_log_prob is not None) != describes_draws:
            raise ValueError(
                f"{path} was saved with sampling_log_probs={not describes_draws}, here it is {describes_draws}: tokens"
                " before and after would differ in it; restore it with the same EngineConfig.sampling_log_probs"
            )
        request.append(token_id, log_prob, dict(map(tuple, tops)), sampling_log_prob)
        if request.finish_reason is not None:
            raise ValueError(
                f"{path} has {len(head['outputs'])} tokens of output, but here the request ends after"
                f" {request.num_output_tokens}, with max_model_len={admission.max_model_len}; raise it in EngineConfig"
            )
    return request
