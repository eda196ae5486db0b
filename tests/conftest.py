"""The strictest settings jax has: no silent promotion of types or ranks."""

import gc
import os
from collections import Counter
from importlib.metadata import version

# The compilers of the extra `aot` are plugins that look for their devices; tests run on CPU unless told otherwise.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# One folder of compiled steps for all tests of a run, subprocesses included, unless the caller has chosen one.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(os.path.dirname(__file__), ".compilation_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
# In subprocesses as well, whose compiled steps are then those of the tests.
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

import hypothesis
import jax
import pytest

from jaxinfer.config import Parallelism
from jaxinfer.device import describe_cpu
from tests import compiler
from tests.durations import LONG, SLOW, is_listed, is_quick, may_have
from tests.memory_maps import are_memory_maps_short, resident_bytes, return_free_memory

# Compiled steps are not loaded from a folder that others can write to, which the umask may have it be.
os.makedirs(os.environ["JAX_COMPILATION_CACHE_DIR"], mode=0o700, exist_ok=True)
# Tracing leaves many objects and little garbage; looking for it takes a twentieth of the time.
gc.set_threshold(50_000, 50, 50)
# No example has a deadline: the first may compile, and other processes may take the cores.
hypothesis.settings.register_profile("jaxinfer", deadline=None)
hypothesis.settings.load_profile("jaxinfer")


# The bytes that a process may have beside those that were left when it last dropped its compiled functions.
MAX_GROWTH = 2 * 2**30
# Seconds of processor, with those of processes that they start: 50 on an idle machine, more beside other work.
MAX_QUICK_SECONDS = 90.0
KEPT_BYTES = pytest.StashKey[int]()
QUICK_SECONDS = pytest.StashKey[dict[str, float]]()


def pytest_ignore_collect(collection_path, config):
    """Leaves files without tests of the mark unread: to rewrite and to import all takes half a minute."""
    return None if may_have(collection_path, config.option.markexpr) else True


def pytest_collection_modifyitems(config, items):
    paths = {item.path for item in items}
    quick = {path for path in paths if is_quick(path)}
    # Only a run of the whole suite leaves them out: a folder or a file that is named runs with its slow tests.
    is_whole = [os.path.realpath(arg) for arg in config.args] == [os.path.dirname(os.path.realpath(__file__))]
    slow = {path for path in paths if is_whole and is_listed(path, SLOW)}
    for item in items:
        if item.path in slow:
            item.add_marker("slow")
        if item.path in quick and not any("llm" in fixture for fixture in item.fixturenames):
            item.add_marker("quick")
        for marker in item.iter_markers("shows"):
            item.user_properties.append(("shows", marker.args))
    if hasattr(config, "workerinput"):
        # Files come in this order to the workers. A long file at the end would run alone; so the last are short ones.
        long = {path for path in paths if is_listed(path, SLOW + LONG)}
        sizes = Counter(item.path for item in items)
        items.sort(key=lambda item: (item.path not in long, -sizes[item.path]))


def pytest_collection_finish():
    # What the modules of the tests have imported stays, and need not be looked through.
    gc.freeze()


def pytest_sessionstart(session):
    # Also under -q: bits that differ between machines are judged on this one.
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not hasattr(session.config, "workerinput"):
        reporter.write_line(f"CPU: {describe_cpu()}; jax {version('jax')}, jaxlib {version('jaxlib')}")


@pytest.fixture
def lines_at_once(monkeypatch):
    """Progress is written to standard error at each update, though that is a file."""
    monkeypatch.setattr("jaxinfer.display.progress.SECONDS_BETWEEN_LINES", 0.0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Fails a quick test that compiles or loads a step of an engine."""
    if not item.get_closest_marker("quick"):
        return (yield)
    from jaxinfer.engine.execution import executable_cache

    def refuse(*_, **__):
        pytest.fail("a quick test may not compile a step of an engine; list its file elsewhere than in QUICK")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_compile", "deserialize_and_load"):
            patch.setattr(executable_cache, name, refuse)
        before = seconds_of_processor()
        result = yield
    item.session.stash.setdefault(QUICK_SECONDS, {})[item.nodeid] = seconds_of_processor() - before
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Fails a quick test before which the others have taken too long."""
    result = yield
    seconds = item.session.stash.get(QUICK_SECONDS, {})
    if item.get_closest_marker("quick") and sum(seconds.values()) > MAX_QUICK_SECONDS:
        slowest = sorted(seconds, key=seconds.__getitem__)[-5:]
        pytest.fail(f"quick tests take more than {MAX_QUICK_SECONDS} seconds of processor, most of all {slowest}")
    return result


def seconds_of_processor() -> float:
    """Returns the seconds of this process and of those that it has started and that have ended."""
    return sum(os.times()[:4])


def pytest_runtest_teardown(item, nextitem):
    is_last_of_file = nextitem is not None and nextitem.path != item.path
    if not is_last_of_file and not item.get_closest_marker("exhaustive"):
        return
    return_free_memory()
    has_grown = is_last_of_file and resident_bytes() > item.session.stash.setdefault(KEPT_BYTES, 0) + MAX_GROWTH
    if has_grown or are_memory_maps_short():
        from tests.on_demand import clear_compiled

        jax.clear_caches()
        clear_compiled()
        return_free_memory()
        item.session.stash[KEPT_BYTES] = resident_bytes()


def pytest_addoption(parser):
    parser.addoption(
        "--tpu-kernels", action="store_true", help="attention by the TPU kernels in Pallas' interpreter: tests/engine"
    )
    parser.addoption(
        "--optimised", action="store_true", help="compile as for users; tests of bits by themselves always do"
    )
    parser.addoption(
        "--mesh",
        metavar="TENSORxEXPERTSxSTAGES",
        help="split the models of tests/engine over devices; see on_devices.py",
    )


def pytest_configure(config):
    config.option.loadscopereorder = False  # xdist would begin with the files that have most tests
    is_of_bits = config.option.markexpr.startswith(("bits", "exhaustive"))
    if not config.option.markexpr.startswith("aot"):
        compiler.set_options(is_optimised=is_of_bits or config.getoption("--optimised"))
    if config.getoption("--tpu-kernels"):
        from tests.engine.engines import SIZES, interpret_tpu_kernels

        SIZES.update({"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1})
        interpret_tpu_kernels(pytest.MonkeyPatch())
    if mesh := config.getoption("--mesh"):
        from jaxinfer.model import stages
        from tests.engine.engines import SMALL

        tensor, experts, num_stages = map(int, mesh.split("x"))
        SMALL["parallelism"] = Parallelism(tensor=tensor, experts=experts, stages=num_stages)
        stages.MIN_PART = 4  # or steps as small as those of tests would be one part
