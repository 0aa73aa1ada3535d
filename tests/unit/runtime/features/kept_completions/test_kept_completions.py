"""Completions are kept with the rewards that the trainer uses, privately and in bounded files."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_run.runtime.features.kept_completions import rank as room
from grpo_run.runtime.features.kept_completions.settings import KeptCompletionsSettings
from grpo_run.runtime.rank.points import RolloutPoints

Events = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def trainer() -> Any:
    """A trainer in step 4, with groups of two and two reward functions."""
    return SimpleNamespace(
        model=SimpleNamespace(training=True),
        num_generations=2,
        reward_func_names=["length", "format"],
        eos_token_ids=[1],
        state=SimpleNamespace(global_step=3),
    )


def session_of(tmp_path: Path, rank: int = 0, groups: int = 9) -> Any:
    """The session of a rank; `warned` has its warnings."""
    warned: list[str] = []
    return SimpleNamespace(
        rank=rank,
        config=SimpleNamespace(
            run_directory=tmp_path, of=lambda settings: KeptCompletionsSettings(groups=groups)
        ),
        settings=SimpleNamespace(attempt=1),
        warn_in_journal=warned.append,
        warned=warned,
    )


ARGUMENTS: Any = ([], ["p", "p", "q", "q"], ["a", "b", "c\ud800", "d"], [[5, 1], [5], [], [5, 6, 7, 1]])
REWARDS = torch.tensor([[row, math.nan if row == 1 else row / 2] for row in range(8)])


def rows(tmp_path: Path, rank: int = 0) -> list[dict[str, Any]]:
    """What a rank has kept."""
    file = tmp_path / "completions" / f"rank{rank}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def keep(
    trainer: Any, session: Any, arguments: Any = ARGUMENTS, rewards: Any = REWARDS, *, times: int = 1
) -> Any:
    """Let rewards be computed so many times in one `train()` call; return what the trainer gets the last
    time.
    """
    points = RolloutPoints()
    room.PART.rollouts(trainer, session, 1, points)
    (handler,) = points.rewards
    return [handler(lambda *given: rewards, *arguments) for _ in range(times)][-1]


def test_the_first_groups_are_kept_with_their_rewards(trainer: Any, tmp_path: Path) -> None:
    """The trainer gets what was computed, as it is."""
    assert keep(trainer, session_of(tmp_path, groups=1)) is REWARDS
    first, second = rows(tmp_path)
    assert first == {
        "train_call": 1, "step": 4, "attempt": 1, "group": 0, "position": 0, "prompt": "p", "completion": "a",
        "tokens": 2, "ended": "eos", "rewards": {"length": 0.0, "format": 0.0},
    }  # fmt: skip
    assert (second["rewards"], second["ended"]) == ({"length": 1.0, "format": None}, "")


def test_each_rank_keeps_its_own_rows(trainer: Any, tmp_path: Path) -> None:
    """Rank 1 has the third and fourth group; three are kept of a rollout."""
    keep(trainer, session_of(tmp_path, 1, groups=3))
    assert [(one["group"], one["position"], one["rewards"]["length"]) for one in rows(tmp_path, 1)] == [
        (2, 0, 4.0), (2, 1, 5.0)
    ]  # fmt: skip


def test_files_are_private(trainer: Any, tmp_path: Path) -> None:
    """They have the text of prompts."""
    keep(trainer, session_of(tmp_path))
    folder = tmp_path / "completions"
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "rank0.jsonl")]
    assert modes == [0o700, 0o600]
    assert len(rows(tmp_path)) == 4


def test_files_are_bounded(trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one before is kept, and each text is cut."""
    monkeypatch.setattr(room, "MAX_FILE_BYTES", 200_000)
    huge = ([], ["p"] * 4, ["x" * 10_000_000] * 4, [[5]] * 4)
    keep(trainer, session_of(tmp_path), huge, times=20)
    sizes = [file.stat().st_size for file in (tmp_path / "completions").iterdir()]
    assert len(sizes) <= 2
    assert sum(sizes) < 2 * 200_000 + 4 * 20_000


def test_a_disk_that_takes_nothing_ends_the_keeping(trainer: Any, tmp_path: Path) -> None:
    """With one warning; the rewards come as before."""
    (tmp_path / "completions").write_text("in the way")
    session = session_of(tmp_path)
    assert keep(trainer, session, times=3) is REWARDS
    assert len(session.warned) == 1


@pytest.mark.parametrize("what", ["evaluation", "other arguments", "other result", "fewer rows"])
def test_what_is_no_rollout_of_training_is_left_out(trainer: Any, tmp_path: Path, what: str) -> None:
    """A subclass may compute its rewards in another way; it gets what it has computed."""
    trainer.model.training = what != "evaluation"
    arguments = ARGUMENTS[:2] if what == "other arguments" else ARGUMENTS
    rewards: Any = {"other result": [1.0], "fewer rows": REWARDS[:4]}.get(what, REWARDS)
    assert keep(trainer, session_of(tmp_path, 1), arguments, rewards) is rewards
    assert rows(tmp_path, 1) == []


def test_a_conversation_is_kept_as_text(trainer: Any, tmp_path: Path) -> None:
    """Each message with its role."""
    chat = [{"role": "user", "content": "2+2?"}]
    keep(trainer, session_of(tmp_path), ([], [chat] * 4, [chat * 2] * 4, [[1]] * 4))
    assert (rows(tmp_path)[0]["prompt"], rows(tmp_path)[0]["completion"]) == (
        "[user] 2+2?", "[user] 2+2?\n[user] 2+2?"
    )  # fmt: skip


def test_a_run_that_keeps_nothing_leaves_the_rewards_alone(trainer: Any, tmp_path: Path) -> None:
    """The default: no method is wrapped."""
    points = RolloutPoints()
    room.PART.rollouts(trainer, session_of(tmp_path, groups=0), 1, points)
    assert points.rewards == []
