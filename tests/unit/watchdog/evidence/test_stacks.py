"""Stacks: both dump formats, the user's line, and groups of equal ranks."""

from __future__ import annotations

import sysconfig

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_run.watchdog.evidence import source, stacks
from grpo_run.watchdog.evidence.stacks import Frame, Stack

SITE = "/venv/lib/python3.11/site-packages"
STDLIB = sysconfig.get_paths()["stdlib"]
HELPER = f"""Thread 0x00007f582ee856c0 (most recent call first):
  File "{STDLIB}/threading.py", line 324 in wait
  File "{STDLIB}/threading.py", line 1002 in _bootstrap
"""
MAIN = f"""Current thread 0x00007f582f9f1b80 (most recent call first):
  File "{SITE}/torch/distributed/distributed_c10d.py", line 2810 in all_reduce
  File "/home/me/train.py", line 88 in reward
  File "/home/me/train.py", line 120 in <module>
  File "{source.BOOTSTRAP}", line 100 in main
  File "<string>", line 1 in <module>
"""
PY_SPY = """Process 18911: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 18990 (idle): "QueueFeederThread"
    wait (/usr/lib/python3.11/threading.py:324)
Thread 18911 (active+gil): "MainThread"
    sre_ucs1_match (/usr/lib/libpython3.11.so.1.0)
    operator() (long) (/home/me/kernels/fast.cpp:12)
    match (/usr/lib/python3.11/re/__init__.py:166)
    judge (/home/me/my judge (old).py:3)
    <module> (/home/me/train.py:4)
    0x7f403ca4524a (libc.so.6)
"""


def made(*frames: tuple[str, int, str]) -> Stack:
    """A main thread with these calls."""
    return Stack("0x1", tuple(Frame(*frame) for frame in frames), True)


AGAIN = MAIN.replace("line 88", "line 99")
CRASH = (
    f"{MAIN}Fatal Python error: Segmentation fault\n\n{AGAIN}\n"
    'Current thread\'s C stack trace (most recent call first):\n  Binary file "x", at f+0x1 [0x2]\n\n'
    "Extension modules: numpy, torch (total: 2)\n"
)
CALLS = {
    324: "wait", 1002: "_bootstrap", 2810: "all_reduce", 88: "reward", 99: "reward", 120: "<module>",
    100: "main", 1: "<module>",
}  # fmt: skip
SHORT = HELPER.replace("Thread", "Current thread")


@pytest.mark.parametrize(
    ("text", "threads"),
    [
        # innermost call first; the bootstrap identifies the main thread at any position, else it is the last
        (f"{HELPER}\n{MAIN}", [(False, [324, 1002]), (True, [2810, 88, 120, 100, 1])]),
        (f"{MAIN}\n{HELPER}", [(True, [2810, 88, 120, 100, 1]), (False, [324, 1002])]),
        (f"{HELPER}\n{SHORT}", [(False, [324, 1002]), (True, [324, 1002])]),
        # the last of several dumps, which are appended without a blank line between them
        (f"{HELPER}\n{MAIN}{HELPER}\n{AGAIN}", [(False, [324, 1002]), (True, [2810, 99, 120, 100, 1])]),
        # the copy keeps the end of a long file: from its first complete thread
        (f"{HELPER}\n{MAIN}"[60:], [(True, [2810, 88, 120, 100, 1])]),
        # a fatal error begins a dump; C frames and lists of modules are no Python frames
        (CRASH, [(True, [2810, 99, 120, 100, 1])]),
    ],
)
def test_all_threads_of_a_dump_are_parsed(text: str, threads: list[tuple[bool, list[int]]]) -> None:
    """With their names, files and functions."""
    found = stacks.parse_faulthandler(text)
    assert [(one.main, [frame.line for frame in one.frames]) for one in found] == threads
    assert {one.thread for one in found} <= {"0x00007f582ee856c0", "0x00007f582f9f1b80"}
    assert all(CALLS[frame.line] == frame.function for one in found for frame in one.frames)


def test_names_of_threads_and_frames_without_a_line() -> None:
    """Newer interpreters name threads; `???` is an unknown value; a thread may have no Python frame."""
    text = (
        "Thread 0x01 [grpo-run (vote)] (most recent call first):\n  <no Python frame>\n\nCurrent thread 0x02"
        ' (most recent call first):\n  File ???, line ??? in ???\n  File "a "b".py", line 3 in f\n'
    )
    vote, main = stacks.parse_faulthandler(text)
    assert (vote.thread, vote.frames) == ("grpo-run (vote)", ())
    assert main.frames == (Frame("", 0, "???"), Frame('a "b".py', 3, "f"))


def test_py_spy_output_is_parsed() -> None:
    """The main thread by its name; native frames are kept, without a line."""
    feeder, main = stacks.parse_py_spy(PY_SPY)
    assert (feeder.thread, feeder.main, main.thread, main.main) == (
        "QueueFeederThread",
        False,
        "MainThread",
        True,
    )
    assert main.frames[0] == Frame("/usr/lib/libpython3.11.so.1.0", 0, "sre_ucs1_match")
    assert main.frames[3].function == "judge (/home/me/my judge" or main.frames[3].line == 3


def test_py_spys_unnamed_main_thread_has_the_process_id() -> None:
    """Before `threading` is imported, threads have no name."""
    text = (
        "Process 7: python\nPython v3.11\n\nThread 7 (active+gil)\n    f (/a.py:1)\nThread 8 (idle)\n    g"
        " (/b.py:2)\n"
    )
    assert [stack.main for stack in stacks.parse_py_spy(text)] == [True, False]


@given(
    st.text(max_size=300)
    | st.lists(st.sampled_from([*MAIN.splitlines(), *PY_SPY.splitlines(), ""])).map("\n".join)
)
def test_any_text_can_be_parsed(text: str) -> None:
    """No text raises an exception or has two main threads."""
    for parse in (stacks.parse_faulthandler, stacks.parse_py_spy):
        assert sum(stack.main for stack in parse(text)) == bool(parse(text))


@pytest.mark.parametrize(
    ("frames", "line"),
    [
        ([(f"{SITE}/torch/x.py", 1, "f"), ("/home/me/train.py", 2, "g"), ("/home/me/train.py", 3, "h")], 2),
        ([(f"{STDLIB}/re/__init__.py", 1, "match"), ("/home/me/train.py", 2, "g")], 2),
        ([("/usr/lib/python3/dist-packages/numpy/a.py", 1, "f"), ("train.py", 2, "g")], 2),
        ([("<frozen runpy>", 1, "f"), ("<string>", 1, "f"), ("/home/me/train.py", 2, "g")], 2),
        ([("/lib/libcuda.so.1", 0, "f"), ("/src/k.cpp", 4, "f"), ("/home/me/train.py", 2, "g")], 2),
        ([(f"{source.OUR_ROOT}/trainers/phases.py", 1, "f"), ("/home/me/train.py", 2, "g")], 2),
        (
            [
                (f"{source.OUR_ROOT}/runtime/features/some/_faults.py", 9, "hang"),
                ("/home/me/train.py", 2, "g"),
            ],
            9,
        ),
        # a recipe has no script of the user's: the innermost telling line of a library
        (
            [
                (f"{SITE}/torch/x.py", 1, "f"),
                (f"{SITE}/accelerate/x.py", 2, "f"),
                (f"{SITE}/trl/trainer/grpo_trainer.py", 3, "_generate"),
                (f"{SITE}/transformers/trainer.py", 4, "train"),
                (f"{source.OUR_ROOT}/trainers/recipes/training.py", 5, "main"),
            ],
            3,
        ),
    ],
)
def test_the_users_line(frames: list[tuple[str, int, str]], line: int) -> None:
    """The innermost frame of the user's code."""
    location = stacks.user_location(made(*frames))
    assert location is not None
    assert location.line == line


def test_a_stack_without_user_code_has_no_line() -> None:
    """A stack of torch and this project only does not show the user's code."""
    assert stacks.user_location(made((f"{SITE}/torch/x.py", 1, "f"), (source.BOOTSTRAP, 2, "main"))) is None
    assert stacks.user_location(made()) is None


def test_ranks_with_equal_stacks_are_grouped() -> None:
    """The largest group first; helper threads and thread identifiers do not matter."""
    waiting, alone = ("/home/me/train.py", 120, "step"), ("/home/me/train.py", 88, "reward")
    helper = Stack("0x9", (), False)
    by_rank = {
        3: [helper, made(waiting)],
        1: [made(alone)],
        0: [made(waiting)],
        2: [made(waiting)],
        4: [helper],
    }
    groups = stacks.group_by_stack(by_rank)
    assert [ranks for ranks, _ in groups] == [(0, 2, 3), (1,)]
    assert stacks.format_stack_groups(groups) == (
        "ranks 0, 2 and 3:\n> step (/home/me/train.py:120)\n\nrank 1:\n> reward (/home/me/train.py:88)\n"
    )


def test_the_text_marks_one_line_and_shortens_libraries() -> None:
    """A recursive function appears several times and is marked once."""
    frame = ("/home/me/train.py", 3, "again")
    text = stacks.format_stack_groups(
        [((0,), made((f"{SITE}/torch/x.py", 1, "f"), (f"{STDLIB}/re/__init__.py", 2, "m"), frame, frame))]
    )
    assert text == (
        "rank 0:\n  f (torch/x.py:1)\n  m (re/__init__.py:2)\n"
        "> again (/home/me/train.py:3)\n  again (/home/me/train.py:3)\n"
    )
