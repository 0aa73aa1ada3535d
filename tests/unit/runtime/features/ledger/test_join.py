"""Of the files of ranks, every prompt gets the state that follows from the steps that count."""

from __future__ import annotations

from collections import Counter
from typing import Any

from grpo_run.runtime.features.ledger._join import PromptLine, join
from grpo_run.runtime.features.ledger._lines import pack
from grpo_run.runtime.features.ledger._replay import Replay
from grpo_run.runtime.features.ledger.report import quantiles, sentences, summary

PROMPTS = ("aaaaaaaa", "bbbbbbbb", "cccccccc", "dddddddd", "eeeeeeee", "ffffffff")
Lines = list[list[Any]]


def begin(attempt: int, step: int, *, ranks: int = 1, per_rollout: int = 1) -> list[Any]:
    """A call goes on."""
    return ["B", 1, attempt, step, ranks, 2, per_rollout]


def draw(
    number: int, step: int, *, epoch: int = 0, prompt: str = "", lengths: tuple[int, ...] = (3, 4)
) -> Any:
    """A rank has generated one group of two."""
    return ["R", number, epoch, step, prompt or PROMPTS[number], pack(lengths)]


def steps(first: int, last: int) -> Lines:
    """Steps of one micro-step each."""
    return [["S", step, step - 1, step] for step in range(first, last + 1)]


def joined(*ranks: Lines, committed: int = 99) -> list[PromptLine]:
    """Join files."""
    return join([Replay.of(lines, rank) for rank, lines in enumerate(ranks)], {1: committed})


def states(lines: list[PromptLine]) -> list[str]:
    """Return the states in the order of the data."""
    return [line.state.value for line in lines]


def test_an_undisturbed_run_trains_every_prompt_once() -> None:
    """With its place in the epoch."""
    file = [begin(0, 0)]
    for step in range(1, 5):
        file += [draw(step - 1, step, epoch=(step - 1) // 2), *steps(step, step)]
    lines = joined(file)
    assert states(lines) == ["trained"] * 4
    assert [(one.epoch, one.position, one.prompt) for one in lines] == [
        (0, 0, PROMPTS[0]), (0, 1, PROMPTS[1]), (1, 0, PROMPTS[2]), (1, 1, PROMPTS[3]),
    ]  # fmt: skip


def test_steps_that_are_done_again_count_in_the_newest_attempt() -> None:
    """The first draw is kept as repeated."""
    file = [
        begin(0, 0), draw(0, 1), *steps(1, 1), draw(1, 2, lengths=(9, 9)), *steps(2, 2),
        begin(1, 1), draw(1, 2), *steps(2, 2),
    ]  # fmt: skip
    lines = joined(file)
    assert states(lines) == ["trained", "trained_again"]
    assert (lines[1].attempt, lines[1].lengths, lines[1].repeated) == (1, [3, 4], [9, 9])


def test_a_rollout_that_a_checkpoint_holds_is_not_generated_again() -> None:
    """It serves two steps, of which the second was done again."""
    file = [
        begin(0, 0, per_rollout=2), draw(0, 1), *steps(1, 2),
        begin(1, 1, per_rollout=2), *steps(2, 2),
    ]  # fmt: skip
    (line,) = joined(file)
    assert (line.state, line.attempt, line.lengths, line.repeated) == ("trained_again", 1, [3, 4], [])


def test_a_step_without_a_commit_does_not_count() -> None:
    """The machine may have crashed before the vote."""
    assert states(joined([begin(0, 0), draw(0, 1), draw(1, 2), *steps(1, 2)], committed=1)) == [
        "trained", "open",
    ]  # fmt: skip


def test_a_prompt_that_no_step_has_used_is_lost() -> None:
    """Although later ones were; also one of which no line tells."""
    file = [begin(0, 0), draw(0, 1), *steps(1, 1), ["S", 2, 2, 3], draw(2, 2)]
    lines = joined(file)
    assert states(lines) == ["trained", "lost", "trained"]
    assert lines[1].prompt == ""


def test_a_prompt_that_another_one_has_replaced_is_lost() -> None:
    """Unless it was drawn elsewhere in its epoch."""
    file = [
        begin(0, 0), draw(0, 1), *steps(1, 1), draw(1, 2), *steps(2, 2),
        begin(1, 1), draw(1, 2, prompt="99999999"), *steps(2, 2),
    ]  # fmt: skip
    lines = joined(file)
    assert states(lines) == ["trained", "trained_again", "lost"]
    assert lines[2].prompt == PROMPTS[1]
    file += [draw(2, 3, prompt=PROMPTS[1]), *steps(3, 3)]
    assert "lost" not in states(joined(file))


def test_a_rollout_that_counts_more_than_once_is_said() -> None:
    """Its micro-steps were used by two steps that both count."""
    lines = joined([begin(0, 0), draw(0, 1), *steps(1, 1), ["S", 2, 0, 1]])
    assert states(lines) == ["twice"]


def test_a_group_that_is_spread_over_ranks_is_one_line() -> None:
    """Its samples are in the order of the ranks."""
    one = [begin(0, 0, ranks=2), ["R", 0, 0, 1, PROMPTS[0], pack([1])], *steps(1, 1)]
    other = [begin(0, 0, ranks=2), ["R", 0, 0, 1, "", pack([2])], ["M", 0, {"nan": [0]}]]
    (line,) = joined(one, other)
    assert (line.prompt, line.lengths, line.masked) == (PROMPTS[0], [1, 2], Counter(nan=1))
    assert line.state == "trained"


def test_a_rank_that_does_not_take_part_any_more_does_not_count() -> None:
    """The call goes on with one rank of two, and generates the step again."""
    one = [begin(0, 0, ranks=2), draw(0, 1), begin(1, 0), draw(0, 1), *steps(1, 1)]
    other = [begin(0, 0, ranks=2), draw(0, 1, prompt=PROMPTS[1])]
    lines = joined(one, other)
    assert [(line.prompt, line.state.value) for line in lines] == [
        (PROMPTS[0], "trained_again"), (PROMPTS[1], "lost"),
    ]  # fmt: skip


def test_groups_without_a_sample_in_the_loss_are_masked_or_quarantined() -> None:
    """By the reason of their rows."""
    file = [begin(0, 0), draw(0, 1), ["M", 0, {"nan": [0, 1]}], *steps(1, 1)]
    file += [draw(1, 2), ["M", 1, {"quarantined": [0, 1]}], *steps(2, 2)]
    lines = joined(file)
    assert states(lines) == ["masked", "quarantined"]
    assert summary(lines)["masked"] == {"nan": 2, "quarantined": 2}


def test_a_rollout_that_one_attempt_has_made_again_is_stale_and_no_fault() -> None:
    """A rollout server had other weights."""
    (line,) = joined([begin(0, 0), draw(0, 1, lengths=(7, 7)), draw(0, 1), *steps(1, 1)])
    assert (line.state, line.stale, line.lengths) == ("trained", 2, [3, 4])


def test_damaged_lines_are_counted_and_left_out() -> None:
    """Of any shape."""
    bad: Lines = [
        ["R", 1],
        ["X"],
        ["M", 7, {"nan": [0]}],
        ["R", 1, 0, 1, PROMPTS[1], "\x00"],
        ["S", None, 0, 1],
    ]
    replay = Replay.of([begin(0, 0), draw(0, 1), *bad, *steps(1, 1)], 0)
    assert replay.damaged == len(bad)
    assert states(join([replay], {1: 1})) == ["trained"]


def test_sums_show_what_counts_beside_what_was_drawn() -> None:
    """A fault that killed long completions would show."""
    file = [begin(0, 0), draw(0, 1, lengths=(90, 90)), begin(1, 0), draw(0, 1, lengths=(1, 3)), *steps(1, 1)]
    sums = summary(joined(file))
    assert sums["lengths"]["trained"] == quantiles([1, 3])
    assert sums["lengths"]["repeated"]["max"] == 90
    assert sums["completions"] == {"trained": 2, "repeated": 2, "drawn": 4, "stale": 0}
    said = sentences(sums)
    assert said[0] == "1 prompt: 1 trained after they were repeated for a fault, 0 lost."
    assert said[-1].startswith("Tokens of the 4 completions drawn: ")


def test_a_ledger_without_lines_has_no_prompts() -> None:
    """Nothing is said of it."""
    assert joined() == joined([]) == joined([begin(0, 0)]) == []
