"""What is wrong is refused in one line, before anything is started."""

from __future__ import annotations

import contextlib

import pytest
from support.builders.refused_commands import error

from grpo_run.cli.launching.command import check_descriptors, parse
from grpo_run.cli.main import main
from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.upstream import versions


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["missing.py"], "missing.py does not exist; give the path of a Python file, or a module"),
        (["."], "script . is a directory"),
        (["-m", "no_such_module"], "module no_such_module cannot be found"),
        (["--nproc-per-node", "two", "train.py"], "--nproc-per-node two"),
        (["--nproc-per-node", "0", "train.py"], "--nproc-per-node 0"),
        (["--nproc-per-node=-1", "train.py"], "--nproc-per-node -1"),
        (["--nnodes", "x", "train.py"], "--nnodes x"),
        (["--nnodes", "2:1", "train.py"], "--nnodes 2:1"),
        (["--nnodes", "0", "train.py"], "--nnodes 0"),
        (["--nnodes", "1:2:3", "train.py"], "--nnodes 1:2:3"),
        (["--no-such-flag", "train.py"], "--no-such-flag"),
        (["--generation", "max_lenght=3", "train.py"], "max_lenght"),
        (["--generation", "max_time=x", "train.py"], "max_time=x"),
        (["--generation", "3", "train.py"], "--generation 3: expected KEY=VALUE"),
        (["--generation", "max_completion_lenght=3", "train.py"], "did you mean max_completion_length"),
        (["--cleanup-every", "-1", "train.py"], "--cleanup-every"),
        (["--cleanup-every", "often", "train.py"], "--cleanup-every"),
        (["--log-completions=-1", "train.py"], "--log-completions must be 0 (none) or more, not -1"),
        (["--snapshot-every", "often", "train.py"], "--snapshot-every often"),
        (["--snapshot-every=-1", "train.py"], "--snapshot-every -1"),
        (["--snapshot-every", "1.5", "train.py"], "--snapshot-every 1.5"),
        (["--snapshot-every", "", "train.py"], "--snapshot-every"),
        (
            ["--snapshot-dir", "/proc", "train.py"],
            "--snapshot-dir /proc: a folder that only this user can access",
        ),
        (["--snapshot-dir", "missing", "train.py"], "--snapshot-dir missing: not a directory"),
        (["--snapshot-dir", "train.py", "train.py"], "--snapshot-dir train.py: not a directory"),
        (["--stop-timeout", "0", "train.py"], "--stop-timeout"),
        (["--stop-timeout", "nan", "train.py"], "--stop-timeout"),
        (["--max-restarts", "-1", "train.py"], "--max-restarts"),
        (["--show-ranks", "first", "train.py"], "--show-ranks first"),
        (["--show-ranks", "", "train.py"], "--show-ranks"),
        (["--show-ranks", "1", "train.py"], "--show-ranks 1: there is no rank 1; the only rank is 0"),
        (
            ["--nproc-per-node", "2", "--show-ranks", "0,7", "train.py"],
            "--show-ranks 0,7: there is no rank 7; ranks are 0 to 1",
        ),
        (["--hygeine-every", "5", "train.py"], "no option --hygeine-every; did you mean --cleanup-every?"),
        (["--nproc-per-nod", "2", "train.py"], "no option --nproc-per-nod; did you mean --nproc-per-node?"),
        (["--cleanup_every=5", "train.py"], "no option --cleanup_every; did you mean --cleanup-every?"),
        (["--generation", "max_tokens=3", "train.py"], "did you mean max_completion_length?"),
        (["--vote-timeout", "0", "train.py"], "--vote-timeout 0: must be above 0 seconds"),
        (
            ["--vote-timeout", "7200", "train.py"],
            "--deadline-ceiling 3600: must be above --vote-timeout (7200 s)",
        ),
        (["--deadline-ceiling", "30", "train.py"], "--deadline-ceiling 30: must be at least 60 seconds"),
        (
            ["--deadline-floor", "90", "--deadline-ceiling", "80", "train.py"],
            "--deadline-floor 90: must not be above --deadline-ceiling (80 s)",
        ),
        (["--mask-capped", "eos", "train.py"], "--mask-capped eos: give none, or some of length, repetition"),
        (["--repeat-rewards-above", "2", "train.py"], "--repeat-rewards-above 2: must be a share"),
        (["--repeat-rewards-above", "nan", "train.py"], "--repeat-rewards-above nan: must be a share"),
        (["--deadline-first", "-1", "train.py"], "--deadline-first -1: must be a number of seconds above 0"),
        (["--deadline-exit", "nan", "train.py"], "--deadline-exit nan"),
        (["--resume-from", "nope", "train.py"], "--resume-from nope: no such run"),
        (["--resume-from", ".", "train.py"], "--resume-from .: not a checkpoint directory"),
        (["--run-id", "a/b", "train.py"], "--run-id"),
        (["--run-id", "..", "train.py"], "--run-id"),
        (["--accelerate-config", "missing.yaml", "train.py"], "missing.yaml"),
        ([], "training_script"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(words: list[str], says: str) -> None:
    """The line names the option and its value."""
    assert says in error(*words)


@pytest.mark.usefixtures("here")
def test_a_wrong_command_line_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    """`main` turns the refusal into the exit code."""
    assert main(["launch", "--no-such-flag", "train.py"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("grpo-run: ")
    assert shown.count("\n") == 1


@pytest.mark.usefixtures("here")
def test_untested_versions_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line; the launch continues."""
    monkeypatch.setattr(versions, "TESTED", {"pytest": ("0.1", "0.1")})
    parse(["train.py"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("grpo-run: not tested with pytest")


@pytest.mark.parametrize(("ranks", "limit", "refused"), [(8, 256, False), (9, 256, True), (64, -1, False)])
def test_a_limit_of_open_files_that_is_too_low_is_refused(ranks: int, limit: int, refused: bool) -> None:
    """The line says what to type; -1 is no limit."""
    expected = pytest.raises(UsageError, match=r"ulimit -n 272") if refused else contextlib.nullcontext()
    with expected:
        check_descriptors(ranks, limit)
