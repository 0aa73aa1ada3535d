"""The command line of `grpo-run launch`: what is accepted, what is refused, and what identifies a run."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_run.cli.launch_options import values
from grpo_run.cli.launch_options.flags import build_parser
from grpo_run.cli.launch_options.parse import LaunchCommand, parse
from grpo_run.cli.launch_options.words import OptionWords
from grpo_run.cli.main import main
from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.record.journal import Journal
from grpo_run.runtime.record.run_directory import RunDirectory

OUR_FLAGS = {
    "--accelerate-config", "--accept-change", "--allow-degrade", "--allow-untested", "--deadline-ceiling", "--deadline-exit",
    "--deadline-first", "--deadline-floor", "--fresh", "--generation", "--guard", "--hygiene-every", "--inject",
    "--keep", "--mask-capped", "--memory-plan", "--memory-trace", "--metrics-addr", "--no-memory-forecast", "--no-preload", "--on-end",
    "--repeat-rewards-above",
    "--require-resume", "--resume-from", "--reward-timeout", "--reward-workers", "--run-dir", "--run-id",
    "--show-ranks", "--snapshot-dir", "--snapshot-every", "--stop-timeout", "--strict-drills", "--tool-timeout",
    "--vote-timeout",
}  # fmt: skip
"""An option is a promise. Add a new one here and to the documentation."""


@pytest.fixture
def at_home(here: Path) -> Path:
    """The working directory of the commands."""
    return here


def torchruns() -> argparse.ArgumentParser:
    """torchrun's own parser."""
    from torch.distributed.run import get_args_parser

    return get_args_parser()


def identity(words: list[str]) -> list[str]:
    """The words that identify the run of this command."""
    return OptionWords(build_parser()).identity(words)


def flags(parser: argparse.ArgumentParser) -> set[str]:
    """Every spelling of every option."""
    return {word for action in parser._actions for word in action.option_strings}


def test_our_options_are_a_promise() -> None:
    """An option is not removed or renamed."""
    assert flags(build_parser()) - flags(torchruns()) == OUR_FLAGS


def test_every_option_of_torchrun_is_accepted() -> None:
    """`grpo-run launch` can replace `torchrun` in any command."""
    assert flags(torchruns()) <= flags(build_parser())


def test_every_option_has_a_help_text() -> None:
    """`--help` describes every option."""
    actions = [action for action in build_parser()._actions if action.option_strings]
    assert [action.option_strings for action in actions if not action.help] == []


def error(*words: str) -> str:
    """The line with which these words are refused."""
    with pytest.raises(UsageError) as caught:
        parse(words)
    line = str(caught.value)
    assert "\n" not in line
    return line


@pytest.mark.usefixtures("at_home")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["missing.py"], "script missing.py does not exist"),
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
        (["--generation", "train.py"], "--generation"),
        (["--generation", "max_completion_lenght=3", "train.py"], "did you mean max_completion_length"),
        (["--hygiene-every", "-1", "train.py"], "--hygiene-every"),
        (["--hygiene-every", "often", "train.py"], "--hygiene-every"),
        (["--snapshot-every", "often", "train.py"], "--snapshot-every often"),
        (["--snapshot-every=-1", "train.py"], "--snapshot-every -1"),
        (["--snapshot-every", "1.5", "train.py"], "--snapshot-every 1.5"),
        (["--snapshot-every", "", "train.py"], "--snapshot-every"),
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
        (["--hygeine-every", "5", "train.py"], "no option --hygeine-every; did you mean --hygiene-every?"),
        (["--nproc-per-nod", "2", "train.py"], "no option --nproc-per-nod; did you mean --nproc-per-node?"),
        (["--hygiene_every=5", "train.py"], "no option --hygiene_every; did you mean --hygiene-every?"),
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
        (["--deadline-first", "-1", "train.py"], "--deadline-first -1: must be a number of seconds above 0"),
        (["--deadline-exit", "nan", "train.py"], "--deadline-exit nan"),
        (
            ["--resume-from", "nope", "train.py"],
            "--resume-from nope: no such run",
        ),
        (
            ["--resume-from", ".", "train.py"],
            "--resume-from .: not a checkpoint directory",
        ),
        (["--run-id", "a/b", "train.py"], "--run-id"),
        (["--run-id", "..", "train.py"], "--run-id"),
        (["--no-python", "train.py"], "--no-python is not supported"),
        (["--run-path", "train.py"], "--run-path is not supported"),
        (["--accelerate-config", "missing.yaml", "train.py"], "missing.yaml"),
        ([], "training_script"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(words: list[str], says: str) -> None:
    """The line names the option and its value."""
    assert says in error(*words)


@pytest.mark.usefixtures("at_home")
def test_a_wrong_command_line_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    """`main` turns the refusal into the exit code."""
    assert main(["launch", "--no-such-flag", "train.py"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("grpo-run: ")
    assert shown.count("\n") == 1


@pytest.mark.usefixtures("at_home")
def test_a_plain_command_has_the_defaults() -> None:
    """torchrun's and ours."""
    made: LaunchCommand = parse(["--nproc-per-node", "2", "train.py", "--lr", "1e-6"])
    config = made.config
    assert (config.target, config.module, config.arguments) == ("train.py", False, ("--lr", "1e-6"))
    assert config.preload
    assert config.run_directory == Path("runs").resolve() / config.run_id
    assert config.run_id.startswith("train-")
    assert (config.hygiene_every, config.budget.failures_without_progress) == (10, 3)
    assert config.shown_ranks == frozenset()
    assert made.elastic.nproc_per_node == "2"


@pytest.mark.usefixtures("at_home")
@pytest.mark.parametrize(
    "arguments",
    [
        ["--generation", "max_time=3"],
        ["--fresh"],
        ["--nproc-per-node", "7"],
        ["--run-id", "mine"],
        ["a=b", "--generation"],
    ],
)
def test_words_after_the_script_are_its_arguments(arguments: list[str]) -> None:
    """Words that look like our options are no exception."""
    config = parse(["train.py", *arguments]).config
    assert list(config.arguments) == arguments
    assert config.generation == {}
    assert config.run_id != "mine"


@pytest.mark.usefixtures("at_home")
@pytest.mark.parametrize(
    "words",
    [
        ["--generation", "max_time=3", "max_completion_length=64", "train.py"],
        ["--generation=max_time=3", "--generation=max_completion_length=64", "train.py"],
        [
            "--generation",
            "max_time=3",
            "--generation",
            "max_completion_length=64",
            "--standalone",
            "train.py",
        ],
        ["--standalone", "--generation", "max_time=3", "max_completion_length=64", "--", "train.py"],
    ],
)
def test_generation_caps_may_be_a_list_or_repeated(words: list[str]) -> None:
    """A list ends at the first word that is not KEY=VALUE."""
    config = parse([*words, "--generation", "mine=1"]).config
    assert config.generation == {"max_time": 3.0, "max_completion_length": 64}
    assert config.arguments[-2:] == ("--generation", "mine=1")


@pytest.mark.parametrize(
    ("words", "split"),
    [
        (["--generation", "a=1", "b=2", "s.py"], ["--generation=a=1", "--generation=b=2", "s.py"]),
        (["-m", "module", "--generation", "a=1"], ["-m", "module", "--generation", "a=1"]),
        (["--nproc-per-node", "2", "s.py", "--generation", "a=1"], ["--nproc-per-node", "2", "s.py", "--generation", "a=1"]),
        (["-r3", "--generation", "a=1", "s.py", "--generation", "b=2"], ["-r3", "--generation=a=1", "s.py", "--generation", "b=2"]),
        (["-r", "3", "--generation", "a=1", "s.py"], ["-r", "3", "--generation=a=1", "s.py"]),
        (["--nproc-per-node=2", "s.py", "--generation", "a=1"], ["--nproc-per-node=2", "s.py", "--generation", "a=1"]),
        (["--fresh", "s.py", "--generation", "a=1"], ["--fresh", "s.py", "--generation", "a=1"]),
    ],
)  # fmt: skip
def test_only_a_list_before_the_script_is_split(words: list[str], split: list[str]) -> None:
    """Words after the script are unchanged."""
    assert OptionWords(build_parser()).split_generation(words) == split


@pytest.mark.parametrize(
    "extra",
    [
        ["--node-rank", "1"], ["--node_rank=1"], ["--local-addr", "10.0.0.1"], ["--nnodes", "2"], ["--nproc-per-node", "2"],
        ["--run-dir", "elsewhere"], ["--metrics-addr", "off"], ["--fresh"], ["--show-ranks", "all"], ["--snapshot-dir", "off"],
        ["--max-restarts", "10"], ["--stop-timeout", "9"], ["--deadline-floor", "9"], ["--inject", "kill@rank0:step3"],
        ["--strict-drills"], ["--on-end", "true"],
        ["--no-preload"], ["--accept-change"], ["--vote-timeout", "60"], ["--snapshot-every", "5"], ["--hygiene-every", "7"],
        ["--generation", "max_time=3"], ["--generation", "max_time=3", "max_completion_length=5"],
        ["--accelerate-config", "zero2.yaml"], ["--resume-from", "x"], ["--require-resume"], ["--allow-untested"],
    ],
)  # fmt: skip
def test_no_option_of_ours_or_torchruns_makes_another_run(extra: list[str]) -> None:
    """A run that is continued with another time limit finds its checkpoints."""
    assert identity([*extra, "train.py", "--lr", "1"]) == identity(["train.py", "--lr", "1"])
    assert identity([*extra, "-m", "jobs.train", "x"]) == ["-m", "jobs.train", "x"]


@pytest.mark.usefixtures("at_home")
def test_a_script_is_recognized_by_its_file() -> None:
    """Other spellings of its path and links to it are the same script; another script or a module is not."""
    Path("link.py").symlink_to("train.py")
    same = [["train.py"], ["./train.py"], [str(Path("train.py").resolve())], ["link.py"], ["--", "train.py"]]
    assert [identity(words) for words in same] == [["train.py"]] * len(same)
    assert identity(["other.py"]) != identity(["train.py"]) != identity(["-m", "train"])
    assert identity(identity(["-m", "train", "x"])) == ["-m", "train", "x"]


@pytest.mark.parametrize("own", [["--fresh"], ["--run-dir", "a"], ["--node-rank=3"], ["--metrics-addr", "x"]])
def test_script_arguments_make_another_run(own: list[str]) -> None:
    """This includes arguments that look like options of the display."""
    assert identity(["train.py", *own]) != identity(["train.py"])
    assert identity(["train.py", "--run-dir", "a"]) != identity(["train.py", "--run-dir", "b"])


def finished(path: Path, *words: str, code: int = 0) -> None:
    """Record that the run of this command has ended in `path`."""
    run = RunDirectory(path=path)
    run.create()
    run.write_run(parse([*words, "train.py"]).config.as_json())
    journal = Journal(run.journal, path.name)
    journal.write("run_started")
    journal.write("run_ended", exit_code=code, sentence="")
    journal.close()


def where(*words: str) -> Path:
    """The run directory of this command."""
    return parse([*words, "train.py"]).config.run_directory


def test_the_same_command_uses_the_same_directory(at_home: Path) -> None:
    """Finished or not."""
    first = where()
    finished(at_home / first)
    assert where() == first


@pytest.mark.parametrize("words", [[], ["--run-id", "exp"]])
def test_fresh_starts_the_next_run_of_the_series(at_home: Path, words: list[str]) -> None:
    """Finished or not; the plain command then finds the newest."""
    first = where(*words)
    finished(at_home / first, *words)
    second = where("--fresh", *words)
    assert second.name == f"{first.name}-2"
    finished(at_home / second, *words, code=75)
    assert where(*words) == second
    assert where("--fresh", *words).name == f"{first.name}-3"


@pytest.mark.parametrize("option", ["--run-dir", "--run-id"])
def test_the_directory_of_another_command_is_refused(at_home: Path, option: str) -> None:
    """Another script, or other arguments; the message shows the recorded command."""
    finished(at_home / ("mine" if option == "--run-dir" else "runs/mine"), option, "mine")
    for words in (["train.py", "--lr", "2"], ["-m", "json.tool"]):
        assert f"another command (train.py); give another {option}" in error(option, "mine", *words)
    assert parse([option, "mine", "train.py"]).config.run_id == (
        "mine" if option == "--run-id" else where().name
    )


def test_fresh_does_not_leave_a_live_run(at_home: Path) -> None:
    """Two runs would write into one output directory."""
    finished(at_home / where(), code=75)
    lock = RunDirectory(path=where()).acquire()
    try:
        assert "is running (pid" in error("--fresh", "train.py")
    finally:
        os.close(lock)


def test_a_run_id_names_that_run_only(at_home: Path) -> None:
    """`exp-2` may be another run, not a continuation of `exp`."""
    finished(at_home / "runs" / "exp", "--run-id", "exp")
    finished(at_home / "runs" / "exp-2", "--run-id", "exp-2", code=75)
    assert where("--run-id", "exp") == Path("runs/exp").resolve()
    assert where("--run-id", "exp", "--fresh") == Path("runs/exp-3").resolve()


def test_fresh_with_the_directory_of_a_run_is_refused(at_home: Path) -> None:
    """The directory is given, so there is no next one to use."""
    finished(at_home / "mine")
    assert "--run-dir" in error("--fresh", "--run-dir", "mine", "train.py")


@pytest.mark.usefixtures("at_home")
def test_fresh_in_a_directory_of_the_users_choice_is_a_run_with_an_id_of_its_own() -> None:
    """Checkpoints in the output directory belong to the id; the plain command then finds it by the directory."""
    usual = parse(["train.py"]).config
    first, second = (parse(["--fresh", "--run-dir", name, "train.py"]).config for name in ("a", "b"))
    assert len({usual.run_id, first.run_id, second.run_id}) == 3
    assert first.series == second.series == usual.run_id
    run = RunDirectory(path=first.run_directory)
    run.create()
    run.write_run(first.as_json())
    assert parse(["--run-dir", "a", "train.py"]).config.run_id == first.run_id


@pytest.mark.usefixtures("at_home")
def test_fresh_nodes_in_directories_of_their_own_need_an_id_that_all_of_them_have() -> None:
    """They have not met, so none can choose it."""
    words = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:29400", "--fresh"]
    assert "the same on every node" in error(*words, "--run-dir", "node-0", "train.py")
    ids = {
        parse([*words, "--run-dir", name, "--run-id", "again", "train.py"]).config.run_id
        for name in ("a", "b")
    }
    assert ids == {"again"}


@pytest.mark.usefixtures("at_home")
def test_a_script_that_sets_import_time_variables_disables_preloading(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A line on standard error says so."""
    Path("train.py").write_text('import os\nos.environ["HF_HOME"] = "x"\n')
    assert parse(["train.py"]).config.preload is False
    assert "HF_HOME" in capsys.readouterr().err


@pytest.mark.usefixtures("at_home")
def test_no_preload_disables_preloading() -> None:
    """Ranks start as fresh interpreters."""
    assert parse(["--no-preload", "train.py"]).config.preload is False


@pytest.mark.usefixtures("at_home")
@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ([], set()),
        (["--show-ranks", "none"], set()),
        (["--show-ranks", "1,0"], {0, 1}),
        (["--show-ranks", "all"], {0, 1, 2}),
    ],
)
def test_shown_ranks(words: list[str], shown: set[int]) -> None:
    """None unless ranks are named."""
    assert parse(["--nproc-per-node", "3", *words, "train.py"]).config.shown_ranks == shown


@pytest.mark.usefixtures("at_home")
@pytest.mark.parametrize(
    "words", [["--log-dir", "logs"], ["--redirects", "3"], ["--tee", "3"], ["--start-method", "fork"]]
)
def test_ignored_options_of_torchrun_cause_a_warning(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """They are accepted, but not silently."""
    parse([*words, "train.py"])
    assert f"{words[0]} is ignored" in capsys.readouterr().err


@pytest.mark.usefixtures("at_home")
@pytest.mark.parametrize(("ranks", "threads"), [("1", None), ("2", "1")])
def test_several_ranks_get_one_thread_each(ranks: str, threads: str | None) -> None:
    """The environment may set another number, as under torchrun."""
    environment = parse(["--nproc-per-node", ranks, "train.py"]).config.environment
    assert environment.get("OMP_NUM_THREADS") == threads


def test_untested_versions_are_refused(at_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--allow-untested` accepts them."""
    from packaging.specifiers import SpecifierSet

    from grpo_run.trainers.upstream import versions

    monkeypatch.setattr(versions, "tested_versions", lambda: {"pytest": SpecifierSet("<0.1")})
    assert "--allow-untested" in error("train.py")
    assert parse(["--allow-untested", "train.py"]).config.allow_untested


def test_deadline_exit_sets_one_deadline(here: Path) -> None:
    """The other deadlines keep their defaults."""
    said = parse(["--deadline-exit", "30", "train.py"]).config.deadlines
    default = parse(["train.py"]).config.deadlines
    assert (said.exit_seconds, default.exit_seconds) == (30.0, 60.0)
    assert replace(said, exit_seconds=60.0) == default


@pytest.mark.usefixtures("at_home")
@pytest.mark.parametrize(
    ("words", "every"),
    [
        ([], None),
        (["--snapshot-every", "auto"], None),
        (["--snapshot-every=0"], 0),
        (["--snapshot-every", "25"], 25),
    ],
)
def test_snapshot_every_is_a_number_or_auto(words: list[str], every: int | None) -> None:
    """auto is the default."""
    assert parse([*words, "train.py"]).config.snapshot_every == every


def test_staging_areas_are_in_a_folder_of_the_user(at_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the given directory; parsing creates nothing of the run's."""
    memory, other = at_home / "memory", at_home / "other"
    memory.mkdir()
    other.mkdir()
    monkeypatch.setattr(values, "SHARED_MEMORY_ROOT", memory)
    for root in (memory, other):
        folder = parse(["--snapshot-dir", str(root), "train.py"]).snapshot_folder
        assert folder == root / f"grpo-run-{os.getuid()}"
        assert list(folder.iterdir()) == []
    assert parse(["--snapshot-dir", "off", "train.py"]).snapshot_folder is None


@pytest.mark.usefixtures("at_home")
def test_snapshots_default_to_dev_shm() -> None:
    """The file system in memory that Linux has."""
    assert build_parser().get_default("snapshot_dir") == "/dev/shm"


def test_several_nodes_do_not_stage_checkpoints(at_home: Path) -> None:
    """Each node would hold a part, so ranks write directly to disk."""
    memory = at_home / "memory"
    memory.mkdir()
    words = ["--snapshot-dir", str(memory), "--nnodes", "2", "train.py"]
    assert parse(words).snapshot_folder is None


def test_an_unusable_default_directory_disables_staging(
    at_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not exist, or cannot be written; the user did not ask for it, so it is no error."""
    memory = at_home / "memory"
    monkeypatch.setattr(values, "SHARED_MEMORY_ROOT", memory)
    assert parse(["--snapshot-dir", str(memory), "train.py"]).snapshot_folder is None
    monkeypatch.setattr(values, "SHARED_MEMORY_ROOT", Path("/proc"))  # no user can create a folder there
    assert parse(["--snapshot-dir", "/proc", "train.py"]).snapshot_folder is None


@pytest.mark.usefixtures("at_home")
def test_an_unusable_named_directory_is_refused() -> None:
    """The user asked for it."""
    assert "--snapshot-dir /proc: a folder that only this user can access" in error(
        "--snapshot-dir", "/proc", "train.py"
    )


@pytest.mark.parametrize(
    ("words", "ends", "share"),
    [
        ((), ("repetition", "deadline"), 0.5),
        (("--mask-capped", "none", "--repeat-rewards-above", "1"), (), 1.0),
        (("--mask-capped", "length,deadline"), ("length", "deadline"), 0.5),
    ],
)
def test_exclusion(at_home: Path, words: Sequence[str], ends: tuple[str, ...], share: float) -> None:
    """Which completions leave the loss, and when rewards are computed once more."""
    exclusion = parse([*words, "train.py"]).config.exclusion
    assert (exclusion.masked_ends, exclusion.repeat_rewards_above) == (ends, share)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--mask-capped", "eos"), "--mask-capped eos: give none, or some of length, repetition, deadline"),
        (("--repeat-rewards-above", "2"), "--repeat-rewards-above 2: must be a share from 0 to 1"),
        (("--repeat-rewards-above", "nan"), "--repeat-rewards-above nan: must be a share from 0 to 1"),
    ],
)
def test_exclusion_that_cannot_be(at_home: Path, words: Sequence[str], said: str) -> None:
    """The line names the option and what it may be."""
    with pytest.raises(UsageError, match=re.escape(said)):
        parse([*words, "train.py"])
