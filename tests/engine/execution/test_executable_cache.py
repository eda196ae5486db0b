"""Compiled functions come back from disk as they were, and only where nothing that they follow from has changed."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.engine.execution import executable_cache
from jaxinfer.engine.execution.executable_cache import compile_or_load

X = np.arange(6, dtype=np.float32)


@functools.partial(jax.jit, static_argnames=("power", "custom"), donate_argnames="state")
def advance(state, x, *, power=1, custom=()):
    return {"sum": jnp.sin(x).sum() * power}, state + x


@pytest.fixture
def folder(tmp_path):
    # JAX's own cache keeps what took it a second to compile, and on a busy machine that may be anything.
    settings = {"jax_compilation_cache_dir": str(tmp_path), "jax_persistent_cache_min_compile_time_secs": 1e9}
    before = {name: jax.config.values[name] for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def num_traces():
    """Counts how often a function is lowered, which is how often it is not loaded."""
    lower, calls = advance.lower, []
    names = {name: getattr(advance, name) for name in ("__module__", "__qualname__", "clear_cache")}
    function = SimpleNamespace(lower=lambda *args, **statics: calls.append(args) or lower(*args, **statics), **names)

    def count(*args, **statics):
        before = len(calls)
        compile_or_load(function, *args, **statics)
        return len(calls) - before

    return count


def kept(folder):
    return sorted(folder.glob("jaxinfer-*"))


def test_what_is_loaded_computes_every_bit_of_what_was_compiled(folder):
    compiled, loaded = (compile_or_load(advance, jnp.zeros(6), X, power=3) for _ in range(2))

    (first, state), (second, other) = compiled(jnp.ones(6), X), loaded(jnp.ones(6), X)

    assert np.array_equal(first["sum"], second["sum"])
    assert np.array_equal(state, other)


ALONE = """
import sys

import jax
import jax.numpy as jnp

from jaxinfer.engine.execution.executable_cache import compile_or_load

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


@jax.jit
def advance(x):
    return (jnp.tanh(x @ x) @ x).sum() + jnp.sort(x, 1).sum()


x = jnp.ones((64, 64))
print(compile_or_load(advance, x)(x))
"""


def test_what_jaxs_own_cache_has_is_compiled_again_so_that_the_next_start_can_load_it(tmp_path):
    def run():
        result = subprocess.run(
            [sys.executable, "-c", ALONE, str(tmp_path)], capture_output=True, text=True, check=True
        )
        assert result.stderr == ""
        return result.stdout, kept(tmp_path)[0].stat().st_mtime_ns

    first, _ = run()
    for file in kept(tmp_path):  # as after a change of the source, which changes our key and not always that of JAX
        file.unlink()
    again, written = run()
    loaded, untouched = run()

    assert first == again == loaded
    assert written == untouched


def test_what_is_loaded_takes_donations(folder):
    compile_or_load(advance, jnp.zeros(6), X)
    state = jnp.zeros(6)

    compile_or_load(advance, state, X)(state, X)

    assert state.is_deleted()


def test_the_second_time_nothing_is_lowered(folder, num_traces):
    assert [num_traces(jnp.zeros(6), X) for _ in range(3)] == [1, 0, 0]


@pytest.mark.parametrize(
    "change",
    [
        lambda count: count(jnp.zeros(7), np.arange(7, dtype=np.float32)),
        lambda count: count(jnp.zeros(6, jnp.int32), np.arange(6, dtype=np.int32)),
        lambda count: count(jnp.zeros(6), X, power=2),
    ],
    ids=["shape", "type", "option"],
)
def test_another_argument_is_another_executable(folder, num_traces, change):
    num_traces(jnp.zeros(6), X)

    assert change(num_traces) == 1


def test_a_setting_of_this_thread_alone_counts(folder, num_traces):
    num_traces(jnp.zeros(6), X)

    with jax.default_matmul_precision("highest"):
        assert num_traces(jnp.zeros(6), X) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("_source", lambda: "another line"), ("_host", lambda: "another processor"), ("version", lambda _: "0.0.1")],
)
def test_other_code_another_machine_and_another_version_compile_anew(folder, num_traces, monkeypatch, name, value):
    num_traces(jnp.zeros(6), X)
    monkeypatch.setattr(executable_cache, name, value)
    executable_cache._surroundings.cache_clear()

    assert num_traces(jnp.zeros(6), X) == 1

    monkeypatch.undo()
    executable_cache._surroundings.cache_clear()
    assert num_traces(jnp.zeros(6), X) == 0


def test_flags_of_the_compiler_count(folder, num_traces, monkeypatch):
    num_traces(jnp.zeros(6), X)
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_cpu_enable_fast_math=false")
    executable_cache._surroundings.cache_clear()

    assert num_traces(jnp.zeros(6), X) == 1

    monkeypatch.undo()
    executable_cache._surroundings.cache_clear()


def test_a_processor_of_the_users_is_never_kept(folder, num_traces):
    assert [num_traces(jnp.zeros(6), X, custom=(abs,)) for _ in range(2)] == [1, 1]
    assert kept(folder) == []


@pytest.mark.parametrize("damage", [lambda content: content[:-9], lambda content: content[:-1] + b"!", lambda _: b""])
def test_a_damaged_file_is_made_anew(folder, num_traces, caplog, damage):
    num_traces(jnp.zeros(6), X)
    (path,) = kept(folder)
    path.write_bytes(damage(path.read_bytes()))

    with caplog.at_level(logging.WARNING):
        assert [num_traces(jnp.zeros(6), X) for _ in range(2)] == [1, 0]

    assert f"{path} cannot be loaded" in caplog.text


def test_where_nothing_can_be_written_the_function_is_there_all_the_same(tmp_path, folder, caplog):
    (tmp_path / "file").write_text("no folder")
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "file" / "below"))

    with caplog.at_level(logging.WARNING):
        output, _ = compile_or_load(advance, jnp.zeros(6), X)(jnp.zeros(6), X)

    assert output["sum"] == pytest.approx(np.sin(X).sum(), rel=1e-5)
    assert "cannot be kept for the next start" in caplog.text


@pytest.mark.parametrize("who", ["group", "others", "owner"])
def test_nothing_is_loaded_that_another_user_could_have_written(folder, num_traces, caplog, monkeypatch, who):
    num_traces(jnp.zeros(6), X)
    executable_cache._is_usable.cache_clear()
    if who == "owner" and os.getuid() == 0:
        os.chown(folder, 4321, -1)
    elif who == "owner":
        monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    else:
        folder.chmod({"group": 0o770, "others": 0o707}[who])

    with caplog.at_level(logging.WARNING):
        assert [num_traces(jnp.zeros(6), X) for _ in range(2)] == [1, 1]

    assert caplog.text.count(f"run `chmod go-w {folder}`") == 1


def test_a_file_that_another_user_could_have_written_is_made_anew(folder, num_traces, caplog):
    num_traces(jnp.zeros(6), X)
    kept(folder)[0].chmod(0o666)

    assert [num_traces(jnp.zeros(6), X) for _ in range(2)] == [1, 0]
    assert "another user can write to it" in caplog.text


def test_without_jaxs_cache_there_is_none_of_ours(folder, num_traces):
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        assert [num_traces(jnp.zeros(6), X) for _ in range(2)] == [1, 1]
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert kept(folder) == []


ON_DEVICES = """
import sys
from functools import partial
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxinfer.engine.execution.executable_cache import compile_or_load
from jaxinfer.model.cache import extract_pages

@jax.jit
def double(x):
    return 2 * x

x = np.arange(8, dtype=np.float32)
mesh = jax.make_mesh((4,), ("model",))
for sharding in (NamedSharding(mesh, PartitionSpec("model")), SingleDeviceSharding(jax.devices()[3])):
    placed = jax.device_put(x, sharding)
    for _ in range(2):
        y = compile_or_load(double, placed)(placed)
        assert y.sharding.device_set == sharding.device_set, y.sharding
        assert np.array_equal(y, 2 * x)
"""


def test_executables_for_several_devices_and_for_one_that_is_not_the_first_come_back(tmp_path):
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
    }

    subprocess.run([sys.executable, "-c", ON_DEVICES], env=environment, check=True, timeout=120)

    assert len(kept(tmp_path)) == 2
