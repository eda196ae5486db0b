"""Pages belong to engines on one kind of CPU, texts to engines of one model."""

from __future__ import annotations

import shutil

import jax
import pytest

from jaxinfer.checkpoint import Checkpoint, load_checkpoint
from jaxinfer.config import CacheConfig, EngineConfig, Parallelism
from jaxinfer.engine.assembly import plan_host
from jaxinfer.engine.engine import BUNDLED_MODEL
from jaxinfer.engine.frontend import page_identity
from jaxinfer.model.stages import for_stages
from jaxinfer.parallel.placement import Placement
from jaxinfer.plan.cache import MemoryQuestion, model_of_engine

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="other devices are named by their kind")


def identity_of_pages(config, engine=None):
    cache_config, engine = CacheConfig(num_pages=1, page_size=16), engine or EngineConfig()
    return page_identity.page_identity(Checkpoint(BUNDLED_MODEL), "float32", config, cache_config, engine)


def test_a_page_is_of_no_use_on_another_cpu(monkeypatch):
    _, config = load_checkpoint(BUNDLED_MODEL)
    here, again = (identity_of_pages(config) for _ in range(2))
    monkeypatch.setattr(page_identity, "describe_cpu", lambda: "another CPU, avx2")
    elsewhere = identity_of_pages(config)

    assert here == again
    assert {aspect for aspect in here if here[aspect] != elsewhere[aspect]} == {"platform"}


@pytest.mark.parametrize(("backend", "num_platforms"), [("cpu", 1), ("gpu", 3)])
def test_a_page_of_other_kernels_is_of_no_use(backend, num_platforms, monkeypatch):
    _, config = load_checkpoint(BUNDLED_MODEL)
    monkeypatch.setattr(page_identity.jax, "default_backend", lambda: backend)

    options: list[dict] = [{}, {"attention": "reference"}, {"exact": True}]
    identities = [identity_of_pages(config, EngineConfig(**own)) for own in options]

    assert len({aspects["platform"] for aspects in identities}) == num_platforms


def test_a_page_in_another_dtype_is_of_no_use():
    _, config = load_checkpoint(BUNDLED_MODEL)

    plain, narrow = (identity_of_pages(config, EngineConfig(cache_dtype=dtype)) for dtype in (None, "fp8"))

    assert {aspect for aspect in plain if plain[aspect] != narrow[aspect]} == {"dtype"}


def test_a_request_saved_in_stages_is_restored_on_one_device():
    _, config = load_checkpoint(BUNDLED_MODEL)

    alone, in_stages = map(identity_of_pages, (config, for_stages(config, 2, scans=False)))

    assert alone == in_stages


def test_a_page_of_other_devices_is_of_no_use():
    _, config = load_checkpoint(BUNDLED_MODEL)
    devices = jax.devices()[:1]
    alone = Placement.of(config, None, devices)
    engine = EngineConfig(), None, ""

    cache_config = CacheConfig(num_pages=1, page_size=16)
    one, mesh = (
        page_identity.page_identity(Checkpoint(BUNDLED_MODEL), "float32", config, cache_config, *engine, devices)
        for devices in (Placement().identity(), alone.identity())
    )

    assert {aspect for aspect in one if one[aspect] != mesh[aspect]} == {"devices"}


def test_a_text_follows_from_the_devices_that_share_the_model():
    one, two = text_identity(parallelism=Parallelism()), text_identity(parallelism=Parallelism(tensor=2))

    assert one == text_identity()
    assert two == one | {"parallelism": "Parallelism(tensor=2, experts=1)"}
    stages = text_identity(parallelism=Parallelism(stages=2))
    assert stages == one | {"parallelism": "Parallelism(tensor=1, experts=1, stages=2)"}


def test_a_text_with_rounded_pages_follows_from_their_size():
    small, large = (text_identity(cache_dtype="int2", page_size=size) for size in (32, 128))

    assert {aspect for aspect in small if small[aspect] != large[aspect]} == {"rounded pages"}


def test_a_text_does_not_depend_on_the_number_of_replicas():
    assert text_identity(parallelism=Parallelism(replicas=2)) == text_identity()


def text_identity(path=BUNDLED_MODEL, dtype="float32", **config):
    checkpoint, engine = Checkpoint(path), EngineConfig(**config)
    question = MemoryQuestion(model=model_of_engine(checkpoint.config, engine), config=engine, dtype=dtype)
    admission, _ = plan_host(checkpoint, question, tokenizer=None)
    return page_identity.text_identity(checkpoint, admission)


CHANGES = {
    "dtype": {"dtype": "bfloat16"},
    "dtype of keys and values": {"cache_dtype": "fp8"},
    "quantization": {"quantization": "int8"},
    "max_model_len": {"max_model_len": 512},
    "num_sink_tokens": {"num_sink_tokens": 128},
}


@pytest.mark.parametrize("aspect", CHANGES)
def test_a_text_follows_from(aspect):
    before, after = text_identity(), text_identity(**CHANGES[aspect])

    assert {name for name in before if before[name] != after[name]} == {aspect.split()[0]}


FILES = (
    *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    *(
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
    ),
)


@pytest.mark.parametrize("name", FILES)
def test_a_text_follows_from_every_file_of_the_model(tmp_path, name):
    shutil.copytree(BUNDLED_MODEL, tmp_path / "model")
    before = text_identity(tmp_path / "model")
    (tmp_path / "model" / name).parent.mkdir(exist_ok=True)
    with (tmp_path / "model" / name).open("ab") as file:
        file.write(b" ")

    after = text_identity(tmp_path / "model")

    assert before == text_identity()
    assert {name for name in before if before[name] != after[name]} == {"model"}


def test_a_text_may_go_on_on_another_cpu_in_other_batches(monkeypatch):
    before = text_identity()
    monkeypatch.setattr(page_identity, "describe_cpu", lambda: "another CPU, avx2")

    assert text_identity(max_num_seqs=3, num_pages=9, decode_loop_steps=8) == before
