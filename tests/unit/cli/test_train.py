"""`grpo-run train`: which word is the recipe, and what is passed to `launch`."""

from __future__ import annotations

import pytest

from grpo_run.cli import train
from grpo_run.cli.launching.options import OptionWords, build_parser
from grpo_run.runtime.errors import UsageError


@pytest.fixture
def words() -> OptionWords:
    """The options that `train` accepts."""
    return OptionWords(build_parser(), extra=("--set",))


@pytest.mark.parametrize(
    "arguments",
    [
        ["arithmetic", "--nproc-per-node", "2", "--set", "seed=3"],
        ["--nproc-per-node", "2", "arithmetic", "--set", "seed=3"],
        ["--set", "seed=3", "--nproc-per-node", "2", "arithmetic"],
        ["--set=seed=3", "arithmetic", "--nproc-per-node", "2"],
    ],
)
def test_the_recipe_may_be_in_any_place(words: OptionWords, arguments: list[str]) -> None:
    """The value of an option is never taken for the recipe."""
    assert train.split(arguments, words) == ("arithmetic", ["seed=3"], ["--nproc-per-node", "2"])


@pytest.mark.parametrize("option", ["--nproc-per-nod", "--nproc-per-nodes"])
def test_a_misspelt_option_is_refused(words: OptionWords, option: str) -> None:
    """It would otherwise start a single rank without a warning."""
    with pytest.raises(UsageError, match=r"did you mean --nproc-per-node\?"):
        train.split(["my.yaml", option, "2"], words)


@pytest.mark.parametrize("arguments", [[], ["--fresh"], ["arithmetic", "gsm8k"]])
def test_there_must_be_exactly_one_recipe(words: OptionWords, arguments: list[str]) -> None:
    """The packaged ones are named."""
    with pytest.raises(UsageError, match=r"one recipe.*arithmetic, gsm8k"):
        train.split(arguments, words)


def test_the_number_of_ranks_has_a_default(words: OptionWords, monkeypatch: pytest.MonkeyPatch) -> None:
    """One per GPU, or one; never beside a number that was given."""
    monkeypatch.setattr(train, "_default_ranks", lambda: "gpu")
    made = train.launch_arguments(*train.split(["arithmetic"], words))
    assert made[made.index("--nproc-per-node") + 1] == "gpu"
    for given in (["--nproc_per_node=2"], ["--nproc-per-node", "2"], ["--accelerate-config", "ddp.yaml"]):
        made = train.launch_arguments(*train.split(["arithmetic", *given], words))
        assert "gpu" not in made


def test_the_same_command_has_the_same_run_id(words: OptionWords) -> None:
    """Options that only affect what is shown do not change it; overrides do."""

    def run_id(*arguments: str) -> str:
        made = train.launch_arguments(*train.split(["arithmetic", *arguments], words))
        return made[made.index("--run-id") + 1]

    assert run_id() == run_id("--show-ranks", "all")
    assert run_id() != run_id("--set", "seed=3")
    assert run_id("--run-id", "mine") == "mine"


def test_the_guards_of_a_recipe_come_before_those_of_the_command(words: OptionWords) -> None:
    """A later setting of the same guard wins."""
    command = train.split(["arithmetic", "--guard", "kl=off"], words)
    made = train.launch_arguments(*command, guards=["kl=stop", "reward=stop:0.3"])
    assert made[:4] == ["--guard=kl=stop", "--guard=reward=stop:0.3", "--guard", "kl=off"]
