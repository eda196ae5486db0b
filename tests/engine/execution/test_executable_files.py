"""Compiled functions come back from a bucket as from a folder, and a bucket that fails keeps nothing from running."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem

from jaxinfer import device
from jaxinfer.device import compilation_cache, enable_compilation_cache
from jaxinfer.engine.execution import executable_files
from jaxinfer.engine.execution.executable_cache import compile_or_load
from jaxinfer.engine.execution.executable_files import Bucket, Folder, cache_place

X = np.arange(6, dtype=np.float32)


@jax.jit
def advance(x):
    return jnp.sin(x).sum()


class RemoteFileSystem(LocalFileSystem):
    """The local file system as one of buckets, with folders that must be made."""

    protocol = "remote"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("remote://") if isinstance(path, str) else path)


fsspec.register_implementation("remote", RemoteFileSystem, clobber=True)


@pytest.fixture
def use(tmp_path, monkeypatch):
    """Sets the user's folder or URL, as the engine does."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in names}
    monkeypatch.setattr(device, "COMPILATION_CACHE", tmp_path / "of the package")
    monkeypatch.setattr(device, "_url_of_steps", [])
    executable_files._bucket.cache_clear()

    def set_place(place):
        jax.config.update("jax_compilation_cache_dir", place)
        enable_compilation_cache()

    yield set_place
    for name, value in before.items():
        jax.config.update(name, value)
    executable_files._bucket.cache_clear()
    fsspec.filesystem("memory").store.clear()


@pytest.fixture(params=["memory", "remote"])
def bucket(request, use, tmp_path):
    """A bucket that is in use: its file system, and the path of its root."""
    url = "memory://steps/here" if request.param == "memory" else f"remote://{tmp_path}/steps/here"
    use(url)
    return fsspec.core.url_to_fs(url)


def num_traces(x=X):
    """Returns how often a function is lowered, which is how often it is not loaded."""
    calls = []
    names = {name: getattr(advance, name) for name in ("__module__", "__qualname__", "clear_cache")}
    function = SimpleNamespace(lower=lambda *args: calls.append(args) or advance.lower(*args), **names)
    assert np.allclose(compile_or_load(function, x)(x), np.sin(x).sum(), atol=1e-6)
    return len(calls)


def test_the_second_time_a_step_comes_from_the_bucket(bucket):
    file_system, root = bucket

    assert [num_traces(), num_traces(), num_traces(X[:5]), num_traces()] == [1, 0, 1, 0]
    assert len(file_system.find(root)) == 2


@pytest.mark.parametrize("damage", [lambda content: content[:-9], lambda content: content[:-1] + b"!", lambda _: b""])
def test_a_damaged_object_is_made_anew(bucket, caplog, damage):
    file_system, root = bucket
    num_traces()
    (path,) = file_system.find(root)
    file_system.pipe_file(path, damage(file_system.cat_file(path)))

    with caplog.at_level(logging.WARNING):
        assert [num_traces(), num_traces()] == [1, 0]

    assert "is cut off or changed" in caplog.text


def refuse(*_, **__):
    raise RuntimeError("403 forbidden")


def test_a_bucket_that_may_only_be_read_is_read_and_said_once(bucket, caplog, monkeypatch):
    num_traces()
    monkeypatch.setattr(type(bucket[0]), "pipe_file", refuse)

    with caplog.at_level(logging.WARNING):
        assert [num_traces(X[:5]), num_traces(X[:4]), num_traces()] == [1, 1, 0]

    assert caplog.text.count("no compiled steps are written at") == caplog.text.count("403 forbidden") == 1


def test_a_bucket_out_of_reach_is_asked_once(bucket, caplog, monkeypatch):
    num_traces()
    monkeypatch.setattr(type(bucket[0]), "cat_file", refuse)

    with caplog.at_level(logging.WARNING):
        assert [num_traces(), num_traces()] == [1, 1]

    assert caplog.text.count("no compiled steps are read at") == caplog.text.count("403 forbidden") == 1


def missing(protocol, monkeypatch):
    def url_to_fs(url):
        raise ImportError(f"Please install a package for {protocol}")

    monkeypatch.setattr("fsspec.core.url_to_fs", url_to_fs)
    return f"{protocol}://bucket/steps"


@pytest.mark.parametrize(
    ("url", "told"),
    [
        (lambda patch: missing("gs", patch), "Please install a package for gs; pip install 'jaxinfer[remote]' and"),
        (lambda patch: patch.setitem(sys.modules, "fsspec.core", None) or "gs://a/b", "pip install 'jaxinfer[remote]'"),
        (lambda _: "unheard-of://bucket/steps", "Protocol not known: unheard-of"),
    ],
    ids=["no package of the file system", "no fsspec", "no such file system"],
)
def test_without_a_package_for_a_bucket_steps_are_compiled_and_a_line_says_so_once(use, monkeypatch, caplog, url, told):
    monkeypatch.setattr(device, "_opens", lambda _: False)
    use(url(monkeypatch))

    with caplog.at_level(logging.WARNING):
        assert [num_traces(), num_traces()] == [1, 1]

    assert caplog.text.count("cannot be used") == 1
    assert told in caplog.text


def test_jax_keeps_its_own_folder_beside_a_bucket_that_it_cannot_open(use, tmp_path):
    use("memory://steps/here")

    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "of the package")
    assert isinstance(cache_place(), Bucket)
    use(str(tmp_path))  # the user thinks again
    assert cache_place() == Folder(tmp_path)


def test_a_url_that_jax_can_open_stays_jaxs_too(use, monkeypatch):
    monkeypatch.setattr(device, "_opens", lambda _: True)

    use("gs://bucket/steps")

    assert jax.config.values["jax_compilation_cache_dir"] == compilation_cache() == "gs://bucket/steps"


@pytest.mark.parametrize("scheme", ["file://", "local://"])
def test_a_url_of_local_files_is_a_folder_with_its_limit_and_its_locks(use, tmp_path, scheme):
    use(f"{scheme}{tmp_path}/steps")

    assert cache_place() == Folder(tmp_path / "steps")


IN_A_BUCKET = """
import sys
from tests.engine.execution import test_executable_files
from jaxinfer.device import enable_compilation_cache

enable_compilation_cache()
print(test_executable_files.num_traces())
"""


def test_the_next_process_finds_what_one_has_left_in_a_bucket(tmp_path):
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": f"remote://{tmp_path}/steps",
        "HOME": str(tmp_path),
    }
    command = [sys.executable, "-c", IN_A_BUCKET]
    runs = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
        for _ in range(2)
    ]

    assert [run.stdout.strip() for run in runs] == ["1", "0"]
