"""Compiled functions come back from disk as they were, and only where nothing that they follow from has changed."""

from __future__ import annotations

import fcntl
import functools
import logging
import os
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.engine.execution import executable_cache, executable_files, executable_key
from jaxinfer.engine.execution.executable_cache import compile_or_load
from jaxinfer.steps.steps import StepOptions
from kernels_pallas.gpu_products import PASSES
from tests.on_devices import with_devices
from tests.replay import SMALL_MODEL

X = np.arange(6, dtype=np.float32)


@functools.partial(jax.jit, static_argnames=("power", "options"), donate_argnames="state")
def advance(state, x, *, power=1, options=None):
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


@pytest.fixture
def slow():
    """A function that takes a while to be lowered, and the arguments of each such call."""
    lower, calls = advance.lower, []
    names = {name: getattr(advance, name) for name in ("__module__", "__qualname__", "clear_cache")}

    def lower_slowly(*args, **statics):
        calls.append(args)
        time.sleep(0.5)
        return lower(*args, **statics)

    return SimpleNamespace(lower=lower_slowly, **names), calls


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
advance(x)  # from now on JAX's cache has it
print(compile_or_load(advance, x)(x))
"""


def alone(program, *arguments):
    """Returns the output of a program in a process of its own, which warns of nothing."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert result.stderr == ""
    return result.stdout


def test_what_jaxs_own_cache_has_is_compiled_again_so_that_the_next_start_can_load_it(tmp_path):
    def run():
        return alone(ALONE, tmp_path), kept(tmp_path)[0].stat().st_ino

    first, _ = run()
    for file in kept(tmp_path):  # as after a change of the source, which changes our key and not always that of JAX
        file.unlink()
    again, written = run()
    loaded, untouched = run()

    assert first == again == loaded
    assert written == untouched


IN_THREADS = """
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.engine.execution.executable_cache import compile_or_load

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
x = np.ones((64, 64), np.float32)


@partial(jax.jit, static_argnames="power")
def of_package(x, power):
    return jnp.tanh(x) * power


@partial(jax.jit, static_argnames="power")
def of_user(x, power):
    return jnp.sin(x) * power


with ThreadPoolExecutor(4) as pool:
    for power in range(8):
        pool.submit(compile_or_load, of_package, x, power=power)
        pool.submit(of_user, x, power=power)
"""


def test_each_step_leaves_one_file_and_functions_of_the_user_that_compile_meanwhile_are_kept(tmp_path):
    alone(IN_THREADS, tmp_path)

    names = Counter(path.name.partition("-")[0] for path in tmp_path.iterdir())
    assert {name: names[name] for name in ("jaxinfer", "jit_of_package", "jit_of_user")} == {
        "jaxinfer": 8,
        "jit_of_package": 0,
        "jit_of_user": 8,
    }


@pytest.fixture
def limit(folder, monkeypatch):
    """Sets the limit that the user gives JAX's cache, for the steps alone: JAX reads it once in a process."""
    return lambda num_bytes: monkeypatch.setattr(executable_files, "_jaxs_limit", lambda: num_bytes)


def size_of_all(folder):
    return sum(path.stat().st_size for path in folder.iterdir())


def test_the_files_stay_within_the_limit_and_the_one_used_longest_ago_goes_first(folder, limit, num_traces):
    num_traces(jnp.zeros(6), X, power=1)
    size = size_of_all(folder)
    limit(3 * size + size // 2)
    for power in (2, 3):
        num_traces(jnp.zeros(6), X, power=power)
    for age, path in enumerate(kept(folder)):  # all long ago
        os.utime(path, (1_000 + age, 1_000 + age))
    assert num_traces(jnp.zeros(6), X, power=2) == 0

    assert num_traces(jnp.zeros(6), X, power=4) == 1

    assert size_of_all(folder) <= 3 * size + size // 2
    assert len(kept(folder)) == 3
    assert [num_traces(jnp.zeros(6), X, power=power) for power in (2, 4)] == [0, 0]


def test_a_step_larger_than_the_limit_is_not_kept_and_the_others_stay(folder, limit, num_traces):
    num_traces(jnp.zeros(6), X)
    limit(size_of_all(folder) - 100)
    before = kept(folder)

    assert num_traces(jnp.zeros(6), X, power=12) == 1
    assert kept(folder) == before


def test_a_limit_of_zero_keeps_nothing(folder, limit, num_traces):
    limit(0)

    assert [num_traces(jnp.zeros(6), X) for _ in range(2)] == [1, 1]
    assert kept(folder) == []


def test_without_a_limit_of_the_user_there_is_one_of_the_package(folder, num_traces, monkeypatch):
    num_traces(jnp.zeros(6), X)
    monkeypatch.setattr(executable_files, "MAX_BYTES", size_of_all(folder) * 3 // 2)

    for power in range(2, 5):
        num_traces(jnp.zeros(6), X, power=power)

    assert len(kept(folder)) == 1


@pytest.mark.parametrize("is_own", [True, False], ids=["the package's folder", "a folder of the user"])
def test_entries_of_jax_count_in_the_packages_own_folder_alone(folder, num_traces, monkeypatch, is_own):
    entry, notes = folder / f"jit_decode_step-{'0' * 64}-cache", folder / "notes"
    for path in (entry, notes):
        path.write_bytes(bytes(10**6))
        os.utime(path, (0, 0))
    monkeypatch.setattr(executable_files, "MAX_BYTES", 10**6)
    if is_own:
        monkeypatch.setattr(executable_files, "COMPILATION_CACHE", folder)

    num_traces(jnp.zeros(6), X)

    assert len(kept(folder)) == 1
    assert (entry.exists(), notes.exists()) == (not is_own, True)


def test_a_start_that_compiles_nothing_also_brings_the_folder_within_the_limit(folder, limit, num_traces):
    num_traces(jnp.zeros(6), X, power=2)
    num_traces(jnp.zeros(6), X)
    limit(size_of_all(folder) * 3 // 4)
    executable_files._is_usable.cache_clear()

    assert num_traces(jnp.zeros(6), X) == 0
    assert len(kept(folder)) == 1


def test_a_file_that_another_process_removes_is_a_miss_and_no_error(folder, num_traces, caplog, monkeypatch):
    num_traces(jnp.zeros(6), X)
    is_private = executable_files._is_private

    def look_and_lose(path):
        found = is_private(path)
        path.unlink()
        return found

    monkeypatch.setattr(executable_files, "_is_private", look_and_lose)
    with caplog.at_level(logging.WARNING):
        assert num_traces(jnp.zeros(6), X) == 1
        monkeypatch.setattr(executable_files, "write_checked", lambda *_: None)  # as if removed at once
        assert num_traces(jnp.zeros(6), X, power=2) == 1

    assert caplog.text == ""


BESIDE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.engine.execution.executable_cache import compile_or_load

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_compilation_cache_max_size", int(sys.argv[2]))
x = np.ones((64, 64), np.float32)


@partial(jax.jit, static_argnames="power")
def scale(x, power):
    return jnp.tanh(x) * power


with ThreadPoolExecutor(2) as pool:
    powers = [power % 12 for power in range(36)]
    for power, compiled in zip(powers, pool.map(lambda power: compile_or_load(scale, x, power=power), powers)):
        assert np.allclose(compiled(x), np.tanh(x) * power)
"""


def test_two_processes_keep_the_limit_of_a_folder_together(tmp_path):
    limit = 60_000  # bytes; a step of these has 10,000 to 15,000

    with ThreadPoolExecutor(2) as pool:
        for process in [pool.submit(alone, BESIDE, tmp_path, limit) for _ in range(2)]:
            process.result()

    assert 3 <= len(kept(tmp_path)) <= 6
    assert size_of_all(tmp_path) <= limit


def test_what_is_loaded_takes_donations(folder):
    compile_or_load(advance, jnp.zeros(6), X)
    state = jnp.zeros(6)

    compile_or_load(advance, state, X)(state, X)

    assert state.is_deleted()


def test_the_second_time_nothing_is_lowered(folder, num_traces):
    assert [num_traces(jnp.zeros(6), X) for _ in range(3)] == [1, 0, 0]


def test_of_two_that_need_a_step_at_once_one_compiles_it_and_both_have_it(folder, slow):
    function, calls = slow

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(compile_or_load, function, jnp.zeros(6), X) for _ in range(2)]
        sums = [future.result()(jnp.zeros(6), X)[0]["sum"] for future in futures]

    assert len(calls) == 1
    assert np.array_equal(*sums)
    assert [path.name for path in folder.iterdir()] == [kept(folder)[0].name]


def test_a_compilation_that_fails_leaves_the_step_to_the_one_that_waits(folder, slow):
    function, calls = slow
    lower = function.lower

    def fail_once(*args, **statics):
        lowered = lower(*args, **statics)
        if len(calls) == 1:
            raise RuntimeError("no memory")
        return lowered

    function.lower = fail_once
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(compile_or_load, function, jnp.zeros(6), X) for _ in range(2)]
        errors = [future.exception() for future in futures]

    assert sorted(map(str, errors)) == ["None", "no memory"]
    assert len(kept(folder)) == len([*folder.iterdir()]) == 1


@pytest.mark.parametrize("state", ["left by a killed process", "held by a stopped process"])
def test_a_lock_that_is_never_released_keeps_no_step_from_being_compiled(folder, num_traces, monkeypatch, state):
    num_traces(jnp.zeros(6), X)
    (path,) = kept(folder)
    path.unlink()
    monkeypatch.setattr(executable_files, "MAX_WAIT_SECONDS", 600 if state.startswith("left") else 0.2)

    with (folder / f".{path.name}.0").open("wb") as lock:
        if state.startswith("held"):
            fcntl.flock(lock, fcntl.LOCK_EX)
        assert num_traces(jnp.zeros(6), X) == 1

    assert kept(folder) == [path]


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


@pytest.fixture(autouse=True)
def _facts_read_anew():
    """Facts of the host and of packages are read again in each test, which may change them, and after it."""
    clear_facts()
    yield
    clear_facts()


def clear_facts():
    executable_key._of_host.cache_clear()
    executable_key._compiler_packages.cache_clear()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("source_digest", lambda *_, **__: "another line"),
        ("_host", lambda: "another processor"),
        ("version", lambda _: "0.0.1"),
    ],
)
def test_other_code_another_machine_and_another_version_compile_anew(folder, num_traces, monkeypatch, name, value):
    num_traces(jnp.zeros(6), X)
    monkeypatch.setattr(executable_key, name, value)
    clear_facts()

    assert num_traces(jnp.zeros(6), X) == 1

    monkeypatch.undo()
    clear_facts()
    assert num_traces(jnp.zeros(6), X) == 0


def test_flags_of_the_compiler_count(folder, num_traces, monkeypatch):
    num_traces(jnp.zeros(6), X)
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_cpu_enable_fast_math=false")
    clear_facts()

    assert num_traces(jnp.zeros(6), X) == 1


def test_a_processor_of_the_users_is_never_kept(folder, num_traces):
    custom: Any = (abs,)
    options = StepOptions(config=SMALL_MODEL, custom=custom)

    assert [num_traces(jnp.zeros(6), X, options=options) for _ in range(2)] == [1, 1]
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
    executable_files._is_usable.cache_clear()
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
    environment = with_devices(4) | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}

    subprocess.run([sys.executable, "-c", ON_DEVICES], env=environment, check=True, timeout=120)

    assert len(kept(tmp_path)) == 2


class Compiling:
    """A jitted function that keeps the options with which it is compiled."""

    def __init__(self):
        self.options = []

    def lower(self):
        return self

    def compile(self, compiler_options):
        self.options.append(compiler_options)

    def clear_cache(self):
        pass


@pytest.mark.parametrize("flags", ["", "--xla_disable_hlo_passes=cse"])
def test_passes_are_left_out_beside_those_of_the_users_flags(flags, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    function = Compiling()

    executable_cache._compile(function, (), {}, {PASSES: "rematerialization"}, without=["other"])

    passes = [*(["cse"] if flags else []), "rematerialization", "other"]
    assert function.options == [{PASSES: ",".join(passes)}]


def test_an_option_that_the_user_has_set_stays(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=4 --xla_dump_to=/tmp/elsewhere")
    function = Compiling()

    executable_cache._compile(function, (), {}, {"xla_gpu_autotune_level": 0, "xla_gpu_cublas_fallback": False})

    assert function.options == [{"xla_gpu_cublas_fallback": False}]


def test_a_gpus_options_follow_the_rows_and_the_weights_and_are_in_the_key(folder, monkeypatch):
    asked, compiled, compile_now = [], [], executable_cache._compile

    def compiler_options(num_rows, itemsize):
        asked.append((num_rows, itemsize))
        return {PASSES: f"none-for-{num_rows}"}

    monkeypatch.setattr(executable_cache, "compiler_options", compiler_options)
    compile_now = executable_cache._compile
    monkeypatch.setattr(
        executable_cache, "_compile", lambda *args, **kwargs: compiled.append(1) or compile_now(*args, **kwargs)
    )

    for num_rows in (8, 64, 8):
        compile_or_load(advance, jnp.zeros(6), X, num_rows=num_rows)
    compile_or_load(advance, jnp.zeros(6, jnp.bfloat16), jnp.zeros(6, jnp.bfloat16))

    assert asked == [(8, 4), (64, 4), (8, 4), (1, 2)]
    assert len(compiled) == 3
