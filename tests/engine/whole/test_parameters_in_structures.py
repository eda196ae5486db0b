"""Every sampling parameter is honoured for an output that has to have a structure; two structures are refused."""

from __future__ import annotations

import dataclasses
import re

import pytest

from jaxinfer.config import SamplingParams
from jaxinfer.sampling_params import STRUCTURES
from tests.engine.engines import ScriptedDrafter, drafts_from, forget_prefixes
from tests.engine.exactness.test_parameters import BASE, PARAMETERS, PROMPTS, contents, contents_under

pytest.importorskip("llguidance")

# Leaves out characters that the parameters deal with, and leaves them others.
CHARACTERS = r"[!-/5-bg-~]"
WITHIN = {"regex": CHARACTERS + "{5,40}"}
FREE = [name for name in PARAMETERS if name not in STRUCTURES]


@pytest.mark.parametrize("name", FREE)
def test_the_parameter_is_honoured_within_a_structure_whatever_the_schedule(llm, crowded_llm, name):
    base, fields = PARAMETERS[name]
    without, params = (dataclasses.replace(base, **WITHIN, **more) for more in ({}, fields))
    (plain,), (alone,) = (contents_under(llm, PROMPTS[-1:], [each]) for each in (without, params))

    forget_prefixes(crowded_llm)
    with drafts_from(crowded_llm, ScriptedDrafter(0.7, alone)):
        crowd = crowded_llm.generate([[7] * 40, *PROMPTS[-1:]], [BASE, params], show_progress=False)[1:]

    assert contents(alone) != contents(plain)
    assert contents(crowd) == contents(alone)
    end = "" if params.skip_special_tokens else "<end>"
    assert all(re.fullmatch(CHARACTERS + "+", completion.text.removesuffix(end)) for completion in alone)


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_second_structure_is_refused(name):
    other = "choices" if name != "choices" else "regex"

    with pytest.raises(ValueError, match=r"\w+ and \w+ are both given; an output can have one structure"):
        SamplingParams(**PARAMETERS[name][1], **PARAMETERS[other][1])
