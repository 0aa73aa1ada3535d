"""Which checkpoints may go."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from grpo_run.runtime.checkpoints.listing import CheckpointEntry, CheckpointState
from grpo_run.runtime.checkpoints.manifest import Manifest, TrainCall
from grpo_run.runtime.checkpoints.pruning import select_prunable


def entry(
    step: int,
    state: CheckpointState = CheckpointState.published,
    *,
    verified: bool | None = True,
    run_id: str = "run-1",
    ordinal: int = 1,
) -> CheckpointEntry:
    """One directory."""
    call = TrainCall(ordinal=ordinal, trainer_class="T", output_dir="out")
    manifest = Manifest(run_id=run_id, train_call=call, step=step, world_size=1, versions={}, files={})
    return CheckpointEntry(
        path=Path(f"out/{run_id}/checkpoint-{step}"), step=step, state=state, size_bytes=1, modified_at=1.0,
        manifest=manifest if state is CheckpointState.published else None, verified=verified,
    )  # fmt: skip


def test_the_newest_verified_stay() -> None:
    """Of each run and call."""
    entries = [entry(step) for step in (1, 2, 3)] + [entry(4, ordinal=2), entry(9, run_id="run-2")]
    assert [one.step for one in select_prunable(entries, keep=2)] == [1]
    assert [one.step for one in select_prunable(entries, keep=1)] == [1, 2]


entries = st.lists(
    st.builds(
        entry,
        st.integers(1, 12),
        st.sampled_from(CheckpointState),
        verified=st.sampled_from([True, False, None]),
        run_id=st.sampled_from(["run-1", "run-2"]),
    ),
    max_size=12,
    unique_by=lambda one: one.path,
)


@given(entries=entries, keep=st.integers(1, 4), aside=st.booleans())
def test_what_cannot_be_verified_is_never_touched_and_one_always_stays(
    entries: list[CheckpointEntry], keep: int, aside: bool
) -> None:
    """Whatever lies there: each run keeps as many verified ones as it is asked to, or has."""
    going = select_prunable(entries, keep=keep, include_unusable=aside)
    for one in going:
        sound = one.state is CheckpointState.published and one.verified is True
        assert sound or (aside and one.state in (CheckpointState.partial, CheckpointState.rejected))
    for run_id in ("run-1", "run-2"):
        verified = [one for one in entries if one.state is CheckpointState.published and one.verified]
        mine = sorted(one.step for one in verified if one.path.parent.name == run_id)
        left = sorted(one.step for one in verified if one.path.parent.name == run_id and one not in going)
        assert left == mine[-keep:]


def test_the_best_stays() -> None:
    """A trainer loads it at the end."""
    assert select_prunable([entry(1), entry(2)], keep=1, best={"checkpoint-1"}) == []
