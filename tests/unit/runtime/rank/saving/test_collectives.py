"""A snapshot costs at most two all-reduces, and all ranks take the same branch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.saving import Guarded, Trainer
from support.vote_groups import ThreadVotes, run_ranks, thread_votes

from grpo_run.runtime.checkpoints.manifest import TrainCall, read_manifest
from grpo_run.runtime.errors import NoHeadroomError
from grpo_run.runtime.event import as_record
from grpo_run.runtime.launch.rank_settings import RankSettings
from grpo_run.runtime.rank.saving import _reservation as reservation
from grpo_run.runtime.rank.saving.saver import RETRY_STEPS
from grpo_run.runtime.rank.saving.snapshots import Snapshots
from grpo_run.runtime.snapshots.area import StagingArea
from grpo_run.runtime.snapshots.headroom import Headroom

RANKS = 3


class Rank(Guarded):
    """One rank with its own trainer and session.

    All ranks share the staging area and the output directory.
    """

    def __init__(self, rank: int, votes: ThreadVotes, folder: Path, settings: RankSettings) -> None:
        journal: list[dict[str, Any]] = []
        notified: list[str] = []
        slot = SimpleNamespace(
            enter=lambda phase: None, leave=lambda phase: None, record_work=lambda: None, checkpoint_step=-1,
            checkpoint_seconds=0.0,
        )  # fmt: skip
        session = SimpleNamespace(
            fence=lambda output_dir: None,
            rank=rank, world_size=RANKS, local_world_size=RANKS, is_main=rank == 0, votes=votes, slot=slot,
            settings=settings, config=settings.config, notify=notified.append, warn=notified.append,
            warn_in_journal=notified.append, notified=notified, board=SimpleNamespace(requests=(False, 0)),
            journal=SimpleNamespace(
                write=lambda event: journal.append(as_record(event)), sync=lambda: None
            ),
        )  # fmt: skip
        self.journal = journal
        call = TrainCall(ordinal=1, trainer_class="GRPOTrainer", output_dir=str(folder / "out"))
        made: Any = Snapshots(session, StagingArea(folder / "memory"))  # type: ignore[arg-type]
        super().__init__(RankTrainer(folder / "out", rank), session, call, made)

    @property
    def votes(self) -> int:
        """The number of all-reduces so far."""
        return int(self.session.votes.count)


class RankTrainer(Trainer):
    """A trainer of which rank 0 writes the model and each rank a file of its own, as under DDP."""

    def __init__(self, output: Path, rank: int) -> None:
        super().__init__(output)
        self.rank = rank

    def _save_checkpoint(self, model: Any, trial: Any) -> str:
        """Write this rank's files."""
        path = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        path.mkdir(parents=True, exist_ok=True)
        (path / f"rank{self.rank}.txt").write_text(str(self.state.global_step))
        self.seen.append((model, trial, self.args.save_total_limit))
        self.during(path)
        return "what the method returns"


@pytest.fixture
def ranks(tmp_path: Path, make_settings: Callable[..., RankSettings]) -> list[Rank]:
    """Three ranks whose votes are connected."""
    votes = thread_votes(RANKS)
    return [Rank(rank, votes[rank], tmp_path, make_settings()) for rank in range(RANKS)]


def step(ranks: list[Rank], number: int, *, scheduled: bool = False) -> list[int]:
    """Finish a step on every rank, with a due snapshot or a scheduled save.

    Return the all-reduces of each rank.
    """
    before = [rank.votes for rank in ranks]
    run_ranks(
        *(lambda rank=rank: rank.step(number, due=not scheduled, scheduled=scheduled) for rank in ranks)
    )
    return [rank.votes - count for rank, count in zip(ranks, before, strict=True)]


def saved_steps(ranks: list[Rank]) -> set[int]:
    """What the ranks believe to be the last saved step; one value if they agree."""
    return {rank.saver.saved_step for rank in ranks}


def out_of_memory(path: Path) -> None:
    """Fail like a buffer that cannot grow."""
    raise NoHeadroomError("the buffer cannot grow")


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_snapshot_costs_two_all_reduces(ranks: list[Rank], scheduled: bool) -> None:
    """One before the copy and one after it, for due snapshots and for scheduled checkpoints."""
    for number in range(1, 4):
        assert step(ranks, number, scheduled=scheduled) == [2, 2, 2]
        assert saved_steps(ranks) == {number}
        assert ranks[0].staged[0] == (number, scheduled)


@pytest.mark.parametrize("victim", range(RANKS))
def test_a_rank_without_memory_costs_two_all_reduces(ranks: list[Rank], victim: int) -> None:
    """No rank counts the snapshot, and all ranks skip the next ones."""
    step(ranks, 1)
    ranks[victim].trainer.during = out_of_memory
    assert step(ranks, 2) == [2, 2, 2]
    assert saved_steps(ranks) == {1}
    assert ranks[0].staged == [(1, False)]
    ranks[victim].trainer.during = lambda path: None
    assert step(ranks, 3) == [0, 0, 0]
    assert step(ranks, 2 + RETRY_STEPS) == [2, 2, 2]
    assert saved_steps(ranks) == {2 + RETRY_STEPS}


def test_without_headroom_a_snapshot_costs_one_all_reduce(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 finds it before the copy."""
    none = Headroom(name="a small limit", free_bytes=0, total_bytes=0)
    monkeypatch.setattr(reservation, "least_headroom", lambda folder: none)
    assert step(ranks, 1) == [1, 1, 1]
    assert ranks[0].staged == []
    assert all(rank.trainer.seen == [] for rank in ranks)


def test_if_all_slots_are_locked_a_snapshot_costs_one_all_reduce(ranks: list[Rank]) -> None:
    """It is skipped on all ranks, and the next one is taken."""
    slots = ranks[0].snapshots.staging.slots
    with slots[0].locked(), slots[1].locked(), slots[2].locked():
        assert step(ranks, 1) == [1, 1, 1]
    assert saved_steps(ranks) == {-1}
    assert step(ranks, 2) == [2, 2, 2]


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("victim", range(RANKS))
def test_non_finite_weights_on_one_rank_cost_one_all_reduce(
    ranks: list[Rank], victim: int, scheduled: bool
) -> None:
    """No rank saves anything, in memory or on disk."""
    step(ranks, 1)
    ranks[victim].make_non_finite()
    assert step(ranks, 2, scheduled=scheduled) == [1, 1, 1]
    assert saved_steps(ranks) == {1}
    assert ranks[0].staged == [(1, False)]
    assert all(len(rank.trainer.seen) == 1 for rank in ranks)
    rejected = [
        record for rank in ranks for record in rank.journal if record["event"] == "checkpoint_rejected"
    ]
    assert [(record["rank"], record["step"]) for record in rejected] == [(0, 2)]


@pytest.mark.parametrize("victim", range(RANKS))
def test_a_scheduled_checkpoint_without_memory_is_saved_directly_by_all_ranks(
    ranks: list[Rank], victim: int, tmp_path: Path
) -> None:
    """The direct save adds one all-reduce, after all ranks have written."""

    def fail_in_memory(path: Path) -> None:
        if not path.is_relative_to(tmp_path / "out"):
            raise NoHeadroomError("the buffer cannot grow")

    ranks[victim].trainer.during = fail_in_memory
    assert step(ranks, 1, scheduled=True) == [3, 3, 3]
    manifest = read_manifest(tmp_path / "out" / "checkpoint-1")
    assert {f"rank{rank}.txt" for rank in range(RANKS)} < set(manifest.files)
    assert saved_steps(ranks) == {1}
    assert step(ranks, 2, scheduled=True) == [2, 2, 2], "directly, without trying memory again"


@pytest.mark.parametrize("victim", range(RANKS))
def test_a_checkpoint_that_one_rank_reads_is_saved_directly_by_all_ranks(
    ranks: list[Rank], victim: int, tmp_path: Path
) -> None:
    """A callback may exist on one rank only."""
    ranks[victim].trainer.args.push_to_hub = True
    assert step(ranks, 1, scheduled=True) == [2, 2, 2]
    assert read_manifest(tmp_path / "out" / "checkpoint-1").step == 1
    assert ranks[0].staged == []
