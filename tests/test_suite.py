"""The suite stays as quick as it is: its lists name files that exist, and engines of tests share their steps."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.durations import LONG, QUICK, SLOW, TESTS, is_listed

# Tests of engines compile steps for every other configuration: seconds each. `tests/engine/engines.py` and
# `tests/engine/conftest.py` have engines to share, and change single fields. More only if a test is of the fields.
MAX_CONFIGS = 45


@pytest.mark.parametrize("listed", [QUICK, SLOW, LONG], ids=["QUICK", "SLOW", "LONG"])
def test_a_list_of_files_names_each_file_once_and_only_files_that_exist(listed):
    assert [name for name in listed if not (TESTS / name).exists()] == []
    assert len({*listed}) == len(listed)


def test_no_file_is_both_slow_and_long():
    assert [name for name in LONG if is_listed(TESTS / name, SLOW)] == []


def test_no_two_files_of_tests_share_a_name():
    """A folder of tests is no package, so pytest imports each file by its name alone."""
    counts = Counter(file.name for file in TESTS.rglob("test_*.py"))

    assert [name for name, count in counts.items() if count > 1] == []


def test_engines_of_tests_have_few_configurations():
    files = sorted((TESTS / "engine").rglob("test_*.py"))
    found = {str(file.relative_to(TESTS)): len(re.findall(r"EngineConfig\([^)]", file.read_text())) for file in files}

    assert sum(found.values()) <= MAX_CONFIGS, {name: count for name, count in found.items() if count}
