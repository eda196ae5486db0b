"""Programs in a process of their own: what they may import, and which cause their end is reported with."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from jaxinfer.text.chat_template import ChatTemplates
from jaxinfer.text.limited_process import BusyError, EndedError, LimitedProcess, LimitedProcesses, LimitError
from jaxinfer.text.structure_trial import Trials

PROGRAM = """
import os, signal, sys, threading  # for questions

def answers():
    return lambda question: eval(question)

def end(text):
    sys.stderr.write(text)
    sys.stderr.flush()
    os.abort()
"""


@pytest.fixture
def process(tmp_path, monkeypatch):
    (tmp_path / "a_program.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    return LimitedProcess("a_program")


# What ends a process, and how the error tells it.
ENDS = {
    "1 / 0": r"exit status 1: ZeroDivisionError: division by zero",
    "int('x')": r"exit status 1: ValueError: invalid literal for int\(\) with base 10: 'x'",
    "{1}": r"exit status 1: TypeError: Object of type set is not JSON serializable",
    "sys.exit('no more')": "exit status 1: no more",
    "os._exit(7)": "exit status 7",
    "os.abort()": "SIGABRT",
    "os.kill(os.getpid(), signal.SIGSEGV)": "SIGSEGV",
    "os.kill(os.getpid(), signal.SIGKILL)": "SIGKILL, which the system sends if its own memory runs out",
    "end('a library\\nhas no way out\\n')": "SIGABRT: has no way out",
    "end('x' * 500)": r"SIGABRT: x+ … x+ \(500 characters\)",
}


@pytest.mark.parametrize("question", ENDS)
def test_an_end_is_reported_with_its_cause_and_the_next_question_is_answered(process, question):
    with pytest.raises(EndedError, match=f"^{ENDS[question]}$"):
        process.ask(question, 20)

    assert process.ask("[1, 'é']", 20) == [1, "é"]


@pytest.mark.parametrize(
    "question",
    [
        "len(bytearray(2**33))",
        "[bytes(2**20) for _ in range(2**12)]",
        "end('memory allocation of 8589934592 bytes failed\\n')",
        "end('terminate called after throwing an instance of \\'std::bad_alloc\\'\\n  what():  std::bad_alloc\\n')",
    ],
)
def test_a_question_that_takes_all_memory_is_reported_as_that(process, question):
    with pytest.raises(LimitError, match="^2 GiB of memory$"):
        process.ask(question, 60)

    assert process.ask("2", 20) == 2


def test_a_question_without_an_end_is_reported_with_its_seconds(process):
    assert process.ask("1", 20) == 1
    with pytest.raises(LimitError, match="^0.2 second$"):
        process.ask("[0 for _ in iter(int, 1)]", 0.2)


@pytest.mark.parametrize("question", ["threading.Event().wait(1.0) or 3", "[os.sched_yield() for _ in range(9)] and 3"])
def test_a_question_that_waits_for_the_machine_has_its_answer(process, question):
    assert process.ask(question, 0.3) == 3  # seconds of processor time


@pytest.mark.parametrize(
    "question", ["threading.Event().wait()", "signal.pause()", "os.kill(os.getpid(), signal.SIGSTOP)"]
)
def test_a_question_without_an_answer_in_time_is_not_blamed(process, question):
    with pytest.raises(
        BusyError, match=r"^the process of a_program had no answer within 2 seconds; try again when the ma"
    ):
        process.ask(question, 0.2)

    assert process.ask("2", 20) == 2


def test_the_time_of_a_question_and_its_answer_on_their_way_does_not_count(process):
    words = "x" * 2**23

    assert len(process.ask(f"'{words}' + 'y' * 2**23", 0.5)) == 2**24


def test_seconds_of_earlier_questions_do_not_count(process):
    work = "sum(range(5_000_000)) and 1"

    assert [process.ask(work, 2.0) for _ in range(20)] == [1] * 20


def test_the_end_of_a_process_holds_up_no_other_question(tmp_path, monkeypatch):
    (tmp_path / "a_program.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    processes = LimitedProcesses("a_program", 2)
    gate = threading.Barrier(2)
    with ThreadPoolExecutor(2) as threads:  # both begin
        own = list(
            threads.map(lambda _: (gate.wait(60), processes.ask("threading.Event().wait(0.5) or os.getpid()", 5)), "ab")
        )
    starts = []
    monkeypatch.setattr(LimitedProcess, "_start", lambda process: starts.append(process))

    with pytest.raises(EndedError):
        processes.ask("os._exit(7)", 5)

    assert len({pid for _, pid in own}) == 2
    assert len({processes.ask("os.getpid()", 5) for _ in range(9)}) == 1  # the other one
    assert not starts


def test_a_program_may_write_any_number_of_warnings(process):
    assert process.ask("[sys.stderr.write('a warning ' * 1000) for _ in range(200)]", 20) == [10_000] * 200
    with pytest.raises(EndedError, match="^exit status 1: ZeroDivisionError: division by zero$"):
        process.ask("print(file=sys.stderr) or 1 / 0", 20)


def test_a_program_that_cannot_be_imported_is_named_with_the_reason(tmp_path, monkeypatch):
    (tmp_path / "half_installed.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    with pytest.raises(RuntimeError, match="half_installed ended before .*: exit status 1: ModuleNotFoundError: No mo"):
        LimitedProcess("half_installed").ask(1, 20)


SHADOWS = ["random", "json", "signal", "jinja2", "jaxinfer", "resource", "sitecustomize"]
RENDER = """
import os, sys
from jaxinfer.text.chat_template import ChatTemplates
messages = [{"role": "user", "content": "ok"}]
os.chdir(sys.argv[1])
print(ChatTemplates({}, {}).render(messages, chat_template="{{ messages[0].content }}"))
"""


def rendered_in(folder: Path, python_path: str, *, is_in_path: bool) -> str:
    """Returns what a program prints that renders a template in a folder."""
    extra = f"import sys; sys.path[:0] = ['', {str(folder)!r}]\n" if is_in_path else ""
    environment = {**os.environ, "PYTHONPATH": python_path}
    program = "import random, json, signal, jinja2, jaxinfer, resource\n" + extra + RENDER
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-c", program, str(folder)], cwd=root, env=environment, capture_output=True, text=True
    ).stdout


@pytest.mark.parametrize(("python_path", "is_in_path"), [("", False), (":", False), (".", False), ("", True)], ids=repr)
def test_no_module_is_read_from_the_current_folder(tmp_path, python_path, is_in_path):
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the user')\n")

    assert rendered_in(tmp_path, python_path, is_in_path=is_in_path) == "ok\n"


def test_a_file_on_the_python_path_stands_for_no_module_of_the_standard_library(process, tmp_path):
    (tmp_path / "random.py").write_text("raise SystemExit('a file of the user')\n")

    assert process.ask("__import__('random').__name__", 20) == "random"


def children() -> set[psutil.Process]:
    return set(psutil.Process().children())


def test_each_thread_gets_the_answer_to_its_own_question_and_waits_its_turn_outside_the_limit(process):
    questions = [f"threading.Event().wait(0.2) or {k}" for k in range(8)]
    process.ask("1", 20)

    with ThreadPoolExecutor(len(questions)) as threads:
        answers = list(threads.map(lambda question: process.ask(question, 1), questions))

    assert answers == list(range(8))


def test_a_process_that_has_ended_leaves_no_open_files(process):
    process.ask("1", 20)
    num_open = psutil.Process().num_fds()

    for _ in range(3):
        with pytest.raises(EndedError):
            process.ask("1 / 0", 20)
        with pytest.raises(LimitError):
            process.ask("[0 for _ in iter(int, 1)]", 0.1)
        with pytest.raises(BusyError):
            process.ask("threading.Event().wait()", 0.02)

    process.ask("1", 20)
    assert psutil.Process().num_fds() == num_open


def test_a_limit_that_ends_the_process_as_the_answer_comes_does_not_end_the_next_question(process, monkeypatch):
    class LateTimer(threading.Timer):
        """Does its work although it is cancelled, a moment afterwards."""

        def run(self):
            self.finished.wait()
            threading.Event().wait(0.1)
            self.function()

    process.ask("1", 20)
    with monkeypatch.context() as patch:
        patch.setattr("threading.Timer", LateTimer)
        assert process.ask("2", 20) == 2

    assert process.ask("threading.Event().wait(0.3) or 3", 20) == 3


def test_a_program_that_never_becomes_ready_is_ended_and_named(tmp_path, monkeypatch):
    (tmp_path / "sleeper.py").write_text("import threading\nthreading.Event().wait()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("jaxinfer.text.limited_process.MAX_START_SECONDS", 0.2, raising=False)
    others = children()

    with pytest.raises(RuntimeError, match=r"^the process of sleeper was not ready within 0.2 seconds; try again"):
        LimitedProcess("sleeper").ask(1, 20)
    assert children() == others


def test_a_chat_template_whose_process_is_killed_is_not_blamed_for_its_memory():
    others, messages = children(), [{"role": "user", "content": "a"}]
    templates = ChatTemplates({}, {})
    templates.render(messages, chat_template="x")
    (child,) = children() - others

    threading.Timer(0.2, child.kill).start()

    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ValueError, match=r"^the chat template ends the process .* \(SIGKILL, .*\); use another one$"):
        templates.render(messages, chat_template=endless)
    assert templates.render(messages, chat_template="x") == "x"


def test_a_structure_whose_process_is_killed_is_not_blamed_for_its_memory():
    others, trials = children(), Trials()
    trials.run("choices", ["a"])
    (child,) = children() - others

    threading.Timer(0.2, child.kill).start()

    with pytest.raises(ValueError, match=r"^json_schema ends the process that .* \(SIGKILL, .*\); make it simpler$"):
        trials.run("json_schema", '{"type": "integer", "multipleOf": 1000003}')
    trials.run("choices", ["a"])
