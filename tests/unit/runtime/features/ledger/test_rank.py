"""What a rank writes of its rollouts and steps, privately and without harm to the training."""

from __future__ import annotations

import json
import stat
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_run.runtime.features.ledger._lines import pack, prompt_digest
from grpo_run.runtime.features.ledger.rank import REWARD, TRUNCATED, LedgerPart
from grpo_run.runtime.rank.points import CallPoints, RolloutPoints

ROWS = [{"prompt": "one"}, {"prompt": "one"}, {"prompt": "two"}, {"prompt": "two"}]
TOKENS = [[5, 6], [5], [5, 6, 7], [5, 6, 7]]


class Rank:
    """One rank, whose trainer makes groups of two, in a rollout for two micro-steps."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.warned: list[str] = []
        self.file = folder / "ledger" / f"rank{rank}.jsonl"
        session: Any = SimpleNamespace(
            rank=rank, world_size=2, is_main=rank == 0, config=SimpleNamespace(run_directory=folder),
            settings=SimpleNamespace(attempt=1), warn_in_journal=self.warned.append,
        )  # fmt: skip
        self.trainer: Any = SimpleNamespace(
            model=SimpleNamespace(training=True), num_generations=2, num_iterations=1, _step=4,
            state=SimpleNamespace(global_step=2, epoch=1.25),
            args=SimpleNamespace(steps_per_generation=2, mask_truncated_completions=True),
        )  # fmt: skip
        facts: Any = SimpleNamespace(has_rollouts=True, max_completion_length=3)
        self.call = CallPoints(train_call=1, trainer=self.trainer, facts=facts, hooks=ExitStack())
        self.rollouts = RolloutPoints(facts=facts)
        part = LedgerPart()
        part.call(session, self.call)
        part.rollouts(self.trainer, session, 1, self.rollouts)

    def step(self, mask: list[list[int]] | None = None, *, generates: bool = True) -> None:
        """Take a step of one micro-step."""
        for begins in self.call.step_begins:
            begins(self.trainer.state.global_step + 1)
        if generates:
            self.roll(mask)
        self.trainer._step += 1
        self.trainer.state.global_step += 1
        for ends in self.call.step_ends:
            ends(self.trainer.state.global_step)

    def roll(self, mask: list[list[int]] | None = None) -> Any:
        """Generate and score a rollout."""
        (take,), (generated,), (scored,) = (
            self.rollouts.inputs, self.rollouts.generation, self.rollouts.scoring,
        )  # fmt: skip

        def score(rows: Any) -> Any:
            tokens = generated(lambda prompts: ([], TOKENS), [row["prompt"] for row in rows])
            assert tokens == ([], TOKENS)
            return {"completion_mask": torch.tensor(mask or [[1]] * 4)}

        return take(lambda rows: scored(score, rows), ROWS)

    @property
    def lines(self) -> list[Any]:
        """What was written."""
        return [json.loads(line) for line in self.file.read_text().splitlines()]


BEGIN = ["B", 1, 1, 2, 2, 2, 2]
DRAWN = ["R", 2, 1, 3, prompt_digest("one") + prompt_digest("two"), pack([2, 1, 3, 3])]


def test_rank_0_writes_rollouts_and_steps(tmp_path: Path) -> None:
    """One rollout serves two steps. Only the user can read the file."""
    rank = Rank(tmp_path)
    rank.step()
    rank.step(generates=False)
    assert rank.lines == [BEGIN, DRAWN, ["S", 3, 4, 5], ["S", 4, 5, 6]]
    assert stat.S_IMODE(rank.file.stat().st_mode) == 0o600
    assert stat.S_IMODE(rank.file.parent.stat().st_mode) == 0o700


def test_other_ranks_write_rollouts_only(tmp_path: Path) -> None:
    """Steps are agreed on."""
    rank = Rank(tmp_path, rank=1)
    rank.step()
    assert rank.lines == [BEGIN, DRAWN]


def test_rows_outside_the_loss_are_written_with_their_reason(tmp_path: Path) -> None:
    """A feature's reason comes before what the row shows."""
    rank = Rank(tmp_path)
    rank.rollouts.leaving.append(lambda: ["", "quarantined", "", ""])
    rank.step([[1], [0], [1], [0]])
    assert ["M", 2, {"quarantined": [1], TRUNCATED: [3]}] in rank.lines
    rank.trainer._step = 6
    rank.rollouts.leaving.clear()
    rank.step([[0], [1], [1], [1]])
    assert ["M", 3, {REWARD: [0]}] in rank.lines


def test_evaluations_are_left_out(tmp_path: Path) -> None:
    """They train nothing."""
    rank = Rank(tmp_path)
    rank.trainer.model.training = False
    rank.roll()
    assert not rank.file.exists()


def test_a_file_that_cannot_be_written_ends_the_ledger_alone(tmp_path: Path) -> None:
    """With one warning."""
    (tmp_path / "ledger").write_text("not a folder")
    rank = Rank(tmp_path)
    rank.step()
    rank.step()
    (warning,) = rank.warned
    assert warning.startswith("the ledger of prompts ends here: ")


@pytest.mark.full
def test_a_step_takes_less_than_two_milliseconds_longer(tmp_path: Path) -> None:
    """Which is 1 % of a step of 0.2 s."""
    rank = Rank(tmp_path)
    taken = []
    for _ in range(500):
        began = time.perf_counter()
        rank.step()
        taken.append(time.perf_counter() - began)
    print(f"median {1e6 * statistics.median(taken):.0f} us a step")
    assert statistics.median(taken) < 0.002
