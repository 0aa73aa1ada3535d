"""What a command means: its defaults, the words that belong to the script, and what implies what."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_run.cli.launching import _values as values
from grpo_run.cli.launching._values import parse_memory_plan
from grpo_run.cli.launching.command import LaunchCommand, parse
from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.launch.config import Output
from grpo_run.runtime.memory.plan import OPTION_NAMES, MemoryPlan


@pytest.mark.usefixtures("here")
def test_a_plain_command_has_the_defaults() -> None:
    """torchrun's and ours."""
    made: LaunchCommand = parse(["--nproc-per-node", "2", "train.py", "--lr", "1e-6"])
    config = made.config
    assert (config.target, config.module, config.arguments) == ("train.py", False, ("--lr", "1e-6"))
    assert config.preload
    assert not parse(["--no-preload", "train.py"]).config.preload
    assert config.run_directory == Path("runs").resolve() / config.run_id
    assert config.run_id.startswith("train-")
    assert (config.cleanup_every, config.budget.failures_without_progress) == (10, 3)
    assert (made.elastic.nproc_per_node, made.elastic.snapshot_dir) == ("2", "/dev/shm")


def test_a_number_of_ranks_on_the_command_line_wins_over_the_accelerate_config(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says so."""
    Path("ddp.yaml").write_text("distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 8\n")
    made = parse(["--accelerate-config", "ddp.yaml", "--nproc-per-node", "2", "train.py"])
    assert made.elastic.nproc_per_node == "2"
    said = capsys.readouterr().err
    assert said == "grpo-run: --nproc-per-node 2 replaces num_processes 8 of ddp.yaml\n"


@pytest.mark.usefixtures("here")
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


@pytest.mark.usefixtures("here")
def test_generation_caps_may_be_repeated() -> None:
    """The same words after the script are the script's."""
    words = ["--generation", "max_time=3", "--generation=max_completion_length=64", "--standalone"]
    config = parse([*words, "--", "train.py", "--generation", "mine=1"]).config
    assert config.generation == {"max_time": 3.0, "max_completion_length": 64}
    assert config.arguments == ("--generation", "mine=1")


@pytest.mark.parametrize(
    ("text", "on_terminal", "elsewhere"),
    [
        (None, set(), {0, 1, 2}),
        ("none", set(), set()),
        ("1,0", {0, 1}, {0, 1}),
        ("all", {0, 1, 2}, {0, 1, 2}),
    ],
)
def test_shown_ranks(text: str | None, on_terminal: set[int], elsewhere: set[int]) -> None:
    """None on a terminal and all elsewhere, unless ranks are named."""
    assert values.shown_ranks(text, Output.lines, 3) == on_terminal
    for output in (Output.merged, Output.apart):
        assert values.shown_ranks(text, output, 3) == elsewhere


@pytest.mark.parametrize(
    ("redirection", "output"),
    [
        (">out", Output.apart),
        (">out 2>&1", Output.merged),
        (">out 2>err", Output.apart),
        ("| cat", Output.apart),
        ("2>&1 | cat", Output.merged),
        (">&-", Output.lines),
        (">out 2>&-", Output.merged),
    ],
)
def test_the_form_of_the_output_follows_from_where_the_streams_lead(
    tmp_path: Path, redirection: str, output: Output
) -> None:
    """A terminal is asked for by `os.isatty`; nothing else in a test is one."""
    code = "from grpo_run.cli.launching._values import output as o; open('form', 'w').write(o().value)"
    subprocess.run(
        f'{sys.executable} -c "{code}" {redirection}', shell=True, cwd=tmp_path, check=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )  # fmt: skip
    assert (tmp_path / "form").read_text() == output.value


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("ranks", "threads"), [("1", None), ("2", "1")])
def test_several_ranks_get_one_thread_each(ranks: str, threads: str | None) -> None:
    """The environment may set another number, as under torchrun."""
    environment = parse(["--nproc-per-node", ranks, "train.py"]).config.environment
    assert environment.get("OMP_NUM_THREADS") == threads


def test_deadline_exit_sets_one_deadline(here: Path) -> None:
    """The other deadlines keep their defaults."""
    said = parse(["--deadline-exit", "30", "train.py"]).config.deadlines
    default = parse(["train.py"]).config.deadlines
    assert (said.exit_seconds, default.exit_seconds) == (30.0, 60.0)
    assert replace(said, exit_seconds=60.0) == default


@pytest.mark.usefixtures("here")
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


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("words", "ends", "share"),
    [
        ([], ("repetition", "deadline"), 0.5),
        (["--mask-capped", "none", "--repeat-rewards-above", "1"], (), 1.0),
        (["--mask-capped", "length,deadline"], ("length", "deadline"), 0.5),
    ],
)
def test_masking(words: list[str], ends: tuple[str, ...], share: float) -> None:
    """Which completions leave the loss, and when rewards are computed once more."""
    masking = parse([*words, "train.py"]).config.masking
    assert (masking.masked_ends, masking.repeat_rewards_above) == (ends, share)


def test_staging_areas_are_in_a_folder_of_the_user(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the given directory; parsing creates nothing of the run's."""
    memory, other = here / "memory", here / "other"
    memory.mkdir()
    other.mkdir()
    monkeypatch.setattr(values, "SHARED_MEMORY_ROOT", memory)
    for root in (memory, other):
        folder = parse(["--snapshot-dir", str(root), "train.py"]).snapshot_folder
        assert folder == root / f"grpo-run-{os.getuid()}"
        assert list(folder.iterdir()) == []
    assert parse(["--snapshot-dir", "off", "train.py"]).snapshot_folder is None
    # each of several nodes would hold a part, so ranks write directly to disk
    assert parse(["--snapshot-dir", str(memory), "--nnodes", "2", "train.py"]).snapshot_folder is None


def test_an_unusable_default_directory_disables_staging(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not exist, or cannot be written; the user did not ask for it, so it is no error."""
    memory = here / "memory"
    monkeypatch.setattr(values, "SHARED_MEMORY_ROOT", memory)
    assert parse(["--snapshot-dir", str(memory), "train.py"]).snapshot_folder is None
    monkeypatch.setattr(values, "SHARED_MEMORY_ROOT", Path("/proc"))  # no user can create a folder there
    assert parse(["--snapshot-dir", "/proc", "train.py"]).snapshot_folder is None


def test_a_plan_is_a_list_of_names_and_numbers() -> None:
    assert parse_memory_plan(None) == MemoryPlan()
    assert parse_memory_plan("micro-batch=2, checkpointing") == MemoryPlan(
        micro_batch_divisor=2, gradient_checkpointing=True
    )
    assert parse_memory_plan(
        "sub-batches=4,vllm-share=0.25,vllm-sleep,offload,expandable-segments"
    ) == MemoryPlan(
        generation_sub_batches=4,
        vllm_gpu_memory_utilization=0.25,
        vllm_sleep=True,
        optimizer_offload=True,
        expandable_segments=True,
    )


def test_the_names_are_fields_of_a_plan() -> None:
    assert set(OPTION_NAMES.values()) <= MemoryPlan.model_fields.keys()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "known: micro-batch"),
        ("micro-batch", "micro-batch=NUMBER"),
        ("micro-batches=2", "did you mean micro-batch?"),
        ("micro-batch=0", "greater than or equal to 1"),
        ("micro-batch=half", "integer"),
        ("checkpointing=yes", "checkpointing without a value"),
        ("micro-batch=2,micro-batch=4", "given twice"),
        ("vllm-share=1.5", "less than or equal to 1"),
        ("checkpointing,", "known"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_memory_plan(text)
    assert str(raised.value).startswith("--memory-plan ")
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
