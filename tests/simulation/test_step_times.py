"""Step times are recovered from measured steps, whatever else the machine did meanwhile."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.engine.scheduling.step import Chunk, Chunks, Step
from jaxinfer.plan.step_shapes import Bucket
from jaxinfer.simulation.step_times import FEATURES, MeasuredStep, StepTimes, fit_step_times, step_features
from tests.engine.fake_device import make_request

DECODE = (2e-3, 1e-5, 0, 4e-4, 1e-4, 3e-7, 0, 5e-7, 0)
PREFILL = (1e-3, 0, 2e-4, 0, 3e-4, 0, 1e-7, 0, 2e-3)


def random_step(rng, is_decode):
    num_rows = int(rng.integers(1, 9))
    chunks = []
    for i in range(num_rows):
        start = int(rng.integers(0, 900))
        chunks.append(Chunk(make_request(i, 1, 1), start, 1 if is_decode else int(rng.integers(2, 60))))
    return Step(Chunks.of(chunks), is_ahead=bool(rng.integers(0, 2)))


def bucket_of(step):
    size = 8 if step.is_decode else 512
    return Bucket(step.is_decode, size, 8)


def measured(rng, count, is_decode, disturbed=0.0):
    steps = []
    for _ in range(count):
        step = random_step(rng, is_decode)
        features = step_features(step, bucket_of(step))
        seconds = float(np.dot(DECODE if is_decode else PREFILL, features))
        steps.append(MeasuredStep(is_decode, features, seconds * (3 if rng.random() < disturbed else 1)))
    return steps


def test_the_features_of_a_step_are_counted():
    requests = [make_request(i, 1, 1) for i in range(2)]
    step = Step(Chunks.of([Chunk(requests[0], 10, 1), Chunk(requests[1], 4, 20)]))

    features = dict(zip(FEATURES, step_features(step, Bucket(False, 64, 4)), strict=True))

    assert features == {
        "step": 1,
        "padded tokens": 64,
        "tokens": 21,
        "tokens in sixteens": 2,
        "rows": 2,
        "context tokens": 11 + 24,
        "attended tokens": (10 + 11) // 2 + 20 * (4 + 24) // 2,
        "longest context": 24,
        "not ahead": 1,
    }


@pytest.mark.parametrize("disturbed", [0.0, 0.2])
def test_times_are_recovered_and_all_together_as_long_as_with_the_disturbed_ones(disturbed):
    rng = np.random.default_rng(0)
    steps = measured(rng, 200, True, disturbed) + measured(rng, 200, False, disturbed)

    times = fit_step_times(steps)

    for is_decode, weights in ((True, DECODE), (False, PREFILL)):
        chosen = [step for step in steps if step.is_decode == is_decode]
        delay = sum(step.seconds for step in chosen) / sum(np.dot(weights, step.features) for step in chosen)
        for _ in range(20):
            step = random_step(rng, is_decode)
            expected = delay * np.dot(weights, step_features(step, bucket_of(step)))
            assert times.seconds(step, bucket_of(step)) == pytest.approx(expected, rel=1e-6)


def test_too_few_steps_are_refused():
    rng = np.random.default_rng(0)

    with pytest.raises(ValueError, match="too short .*, 7 prefill steps of it were measured and 8 are the least"):
        fit_step_times(measured(rng, 20, True) + measured(rng, 7, False))


def test_times_survive_a_file(tmp_path):
    times = StepTimes(DECODE, PREFILL)
    times.save(tmp_path / "times.json")

    assert StepTimes.load(tmp_path / "times.json") == times


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"features": ["step"], "decode": [1], "prefill": [1]}'])
def test_a_file_without_step_times_is_refused(tmp_path, text):
    path = tmp_path / "times.json"
    path.write_text(text)

    with pytest.raises(ValueError, match=r"times\.json.* holds no step times: .*measure them anew"):
        StepTimes.load(path)


def test_weights_that_are_not_one_for_each_feature_are_refused():
    with pytest.raises(ValueError, match="prefill has 1 weights; give one for each of step, padded tokens"):
        StepTimes(DECODE, (1.0,))


def test_a_file_name_of_control_characters_is_shown_with_its_option():
    with pytest.raises(ValueError, match=r"^step_times='\\r' cannot be read \(No such file or directory\)"):
        StepTimes.load("\r")
