"""A plain TRL script under `grpo-run launch`: weights, status, and use of the run directory."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support import loops, warm
from support.references import undisturbed
from support.runs import BIN, QUIET, SCRIPTS, WITH_SCRIPTS, Runs, digest, special

STEPS = ("--max-steps", "12", "--save-steps", "4")


@pytest.mark.parametrize("script", ["grpo.py", "sft_then_grpo.py", "rloo.py", "sft.py"])
@pytest.mark.full
def test_weights_equal_torchruns(script: str, runs: Runs, tmp_path: Path) -> None:
    """An undisturbed supervised run ends with the weights of torchrun; see `test_output_in_pipes.py` too."""
    run = runs("--nproc-per-node", "2", str(SCRIPTS / script), "--output-dir", "ours", *STEPS).start().ended()
    assert digest(tmp_path / "ours") == undisturbed(script, 12)
    status = run.status()
    assert status["state"] == "finished"
    assert status["recoveries"] == []
    assert status["attempts"] == 1
    assert status["checkpoint"]["verified"] is True


@pytest.mark.parametrize(
    "cold", [pytest.param(None, id="warm"), pytest.param(True, id="cold", marks=pytest.mark.full)]
)
def test_same_command_on_a_finished_run_says_so(cold: bool | None, tmp_path: Path) -> None:
    """The same command without a run id finds its run; if finished, it exits with 0 and mentions --fresh."""
    command = [
        str(BIN / "grpo-run"), "launch", "--metrics-addr", "off", "--nproc-per-node", "1",
        str(SCRIPTS / "sft.py"), "--output-dir", "out", "--max-steps", "2", "--save-steps", "2",
    ]  # fmt: skip
    environment = dict(os.environ) if cold else None  # nothing is prepared for a cold start
    code, printed = warm.run(command, cwd=tmp_path, environment=environment, cold=cold)
    assert code == 0, printed
    code, printed = warm.run(command, cwd=tmp_path)
    assert code == 0, printed
    assert "has finished" in printed
    assert "--fresh" in printed
    assert len(list((tmp_path / "runs").iterdir())) == 1
    code, printed = warm.run([*command[:2], "--fresh", *command[2:]], cwd=tmp_path)
    assert code == 0, printed
    assert len(list((tmp_path / "runs").iterdir())) == 2
    assert "starts from step 0" in printed


def test_module_target(runs: Runs, tmp_path: Path) -> None:
    """`-m package.module` runs as with `python -m`: package, arguments and `sys.path[0]` are the same."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "__init__.py").touch()
    (tmp_path / "jobs" / "hello.py").write_text(
        "import sys, pathlib\n"
        "pathlib.Path('seen.txt').write_text(repr((__name__, __package__, sys.argv[1:], sys.path[0])))\n"
    )
    runs("--nproc-per-node", "1", "-m", "jobs.hello", "--x", "1").start().ended()
    assert (tmp_path / "seen.txt").read_text() == repr(("__main__", "jobs", ["--x", "1"], str(tmp_path)))


def test_script_that_sets_import_time_variables_gets_a_fresh_interpreter(runs: Runs, tmp_path: Path) -> None:
    """Libraries read HF_HOME there. The script's first lines run twice, but only once in the next attempt."""
    (tmp_path / "early.py").write_text(
        "import os, sys\n"
        "assert 'transformers' not in sys.modules\n"
        "print('BEGINS', file=open('begins.txt', 'a'))\n"
        "os.environ['HF_HOME'] = os.path.abspath('cache')\n"
        "import huggingface_hub.constants as c, pathlib, signal\n"
        "if len(open('begins.txt').readlines()) < 3: os.kill(os.getpid(), signal.SIGKILL)\n"
        "pathlib.Path('seen.txt').write_text(c.HF_HOME)\n"
    )
    run = runs("--nproc-per-node", "1", "early.py").start().ended()
    assert (tmp_path / "seen.txt").read_text() == str(tmp_path / "cache")
    assert len((tmp_path / "begins.txt").read_text().split()) == 3
    assert [event["reason"] for event in run.events("fresh_interpreters")] == ["the script sets HF_HOME"]


def test_ranks_start_with_the_libraries_that_a_step_imports(runs: Runs, tmp_path: Path) -> None:
    """A GRPO step imports no library for the first time, which every recovery would wait for."""
    source = (SCRIPTS / "grpo.py").read_text()
    (tmp_path / "script.py").write_text(
        "import atexit, pathlib\nfrom importlib.machinery import SourceFileLoader\nexecuted, execute = set(),"
        " SourceFileLoader.exec_module\ndef exec_module(loader, module):\n    executed.add(module.__name__)\n"
        "    execute(loader, module)\nSourceFileLoader.exec_module = exec_module\natexit.register(lambda:"
        " pathlib.Path('new.txt').write_text(' '.join(name for name in executed if '.' not in name)))\n"
        + source.replace("from __future__ import annotations\n", "", 1)
    )
    runs(
        "--nproc-per-node", "1", "script.py", "--output-dir", "ours", "--max-steps", "2", "--save-steps", "4",
        environment=WITH_SCRIPTS,
    ).start().ended()  # fmt: skip
    assert (tmp_path / "new.txt").read_text().split() == ["tiny"]  # a module beside the test scripts


@pytest.mark.full
def test_fresh_interpreters_recover_with_equal_weights(runs: Runs, tmp_path: Path) -> None:
    """With `--no-preload`, a killed rank of a loop, which imports torch and no Trainer, resumes to the same
    numbers.
    """
    words = ("--form", "for", "--steps", "8")
    expected = loops.undisturbed(tmp_path, *words)
    run = (
        loops.launched(runs, tmp_path, *words, options=("--no-preload", *loops.kills([5], 1))).start().ended()
    )
    assert len(run.status()["recoveries"]) == 1
    assert not (different := loops.differences(tmp_path / "out", expected)), different


@pytest.mark.full
def test_fresh_interpreters_of_a_trainer_recover_with_equal_weights(runs: Runs, tmp_path: Path) -> None:
    """With `--no-preload`, a killed rank resumes to the same weights."""
    run = runs(
        "--no-preload", "--nproc-per-node", "1", str(SCRIPTS / "grpo.py"), "--output-dir", "ours", *STEPS
    )
    with run.held(after=5):
        run.start().until_step(5)
        run.kill(0)
    run.ended()
    assert digest(tmp_path / "ours") == undisturbed("grpo.py", 12, ranks=1)
    assert len(run.status()["recoveries"]) == 1


@pytest.mark.parametrize("preload", [[], pytest.param(["--no-preload"], marks=pytest.mark.full)])
def test_ranks_inherit_standard_input(preload: list[str], tmp_path: Path) -> None:
    """As under torchrun: what is piped into the command can be read by the script."""
    (tmp_path / "read.py").write_text(
        "import sys, pathlib; pathlib.Path('seen').write_text(sys.stdin.read())\n"
    )
    command = [
        str(BIN / "grpo-run"), "launch", *preload, "--metrics-addr", "off", "--snapshot-dir", "off",
        "read.py",
    ]  # fmt: skip
    code, printed = warm.run(command, cwd=tmp_path, piped=b"one\ntwo\n")
    assert code == 0, printed
    assert (tmp_path / "seen").read_text() == "one\ntwo\n"


@pytest.mark.parametrize("preload", [pytest.param([], marks=pytest.mark.full), ["--no-preload"]])
def test_ranks_are_bound_and_shown_and_recorded_as_torchruns_options_say(
    preload: list[str], tmp_path: Path
) -> None:
    """`--numa-binding`, `--local-ranks-filter` and `--event-log-handler`."""
    (tmp_path / "where.py").write_text(
        "import os; print('on', *os.sched_getaffinity(0), os.environ['RANK'])\n"
    )
    command = [
        *special("bound"), "launch", *preload, "--metrics-addr", "off", "--snapshot-dir", "off",
        "--nproc-per-node", "2", "--numa-binding", "node", "--local-ranks-filter", "1",
        "--event-log-handler", "console", "where.py",
    ]  # fmt: skip
    code, printed = warm.run(command, cwd=tmp_path)
    assert code == 0, printed
    last = max(os.sched_getaffinity(0))
    assert [line for line in printed.splitlines() if line.startswith("on ")] == [f"on {last} 1"]
    assert printed.count('"name": "torchelastic.worker.status.SUCCEEDED", "source": "WORKER"') == 2
    logs = sorted(tmp_path.glob("runs/*/attempts/000/rank?.log"))
    assert [log.read_text() for log in logs] == [f"on {last} 0\n", f"on {last} 1\n"]


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


BEGUN_CPU_SECONDS = 0.2
"""Python itself, which prints a traceback if it is interrupted while it starts, has started by then."""


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    ("delay_seconds", "number"),
    [
        pytest.param(0.1, signal.SIGHUP, marks=pytest.mark.full), (0.6, signal.SIGINT),
        pytest.param(1.3, signal.SIGTERM, marks=pytest.mark.full),
        pytest.param(2.3, signal.SIGINT, marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_a_signal_during_start_up_is_one_line(
    tmp_path: Path, delay_seconds: float, number: signal.Signals
) -> None:
    """Every process of the foreground group gets it; none prints a traceback, and none is left."""
    # a script that may have a Trainer is stopped with 75 also after its ranks have started, another with 93
    (tmp_path / "train.py").write_text("import time\ntime.sleep(60)\nimport trl\n")
    process = subprocess.Popen(
        [str(BIN / "grpo-run"), "launch", "--metrics-addr", "off", "--nproc-per-node", "2", "train.py"],
        cwd=tmp_path, env={**os.environ, **QUIET}, start_new_session=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while _cpu_seconds(process.pid) < BEGUN_CPU_SECONDS and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(delay_seconds)
    os.killpg(process.pid, number)
    time.sleep(0.5)
    if process.poll() is None:
        os.killpg(process.pid, number)  # ranks are running: do not wait for a vote they never reach
    output, _ = process.communicate(timeout=60)
    assert "Traceback" not in output, output
    assert process.returncode == 75, output
    deadline = time.monotonic() + 10  # helpers exit when they find that the supervisor has
    while _group_exists(process.pid):
        assert time.monotonic() < deadline, "a process of the group is left"
        time.sleep(0.05)


@pytest.mark.parametrize(("words", "shown"), [((), True), (("--show-ranks", "none"), False)])
def test_a_pipe_gets_events_without_control_codes_apart_from_what_ranks_print(
    tmp_path: Path, words: tuple[str, ...], shown: bool
) -> None:
    """What the script prints is in the rank's log, and shown unless `--show-ranks` says otherwise."""
    (tmp_path / "train.py").write_text("print({'loss': 0.25})\n")
    command = [
        str(BIN / "grpo-run"), "launch", "--metrics-addr", "off", "--snapshot-dir", "off", "--run-dir", "run",
        *words, "train.py",
    ]  # fmt: skip
    (stdout, first), (stderr, second) = os.pipe(), os.pipe()
    process = warm.start(
        command, cwd=tmp_path, environment={**os.environ, **QUIET}, stdout=first, stderr=second
    )
    os.close(first)
    os.close(second)
    with open(stdout) as printed_file, open(stderr) as events_file:
        printed, events = printed_file.read(), events_file.read()
    assert process.wait(120) == 0, events
    assert printed == ("{'loss': 0.25}\n" if shown else "")
    assert "0.25" not in events
    assert not {"\x1b", "\r"} & set(events)
    assert all(re.match(r"\d\d:\d\d:\d\d grpo-run: ", line) for line in events.splitlines())
    assert (tmp_path / "run" / "attempts" / "000" / "rank0.log").read_text() == "{'loss': 0.25}\n"
