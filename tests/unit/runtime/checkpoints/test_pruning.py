"""Selection of the checkpoints that `grpo-run checkpoints prune` deletes."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from grpo_run.runtime.checkpoints.listing import CheckpointEntry, CheckpointState, select_prunable
from grpo_run.runtime.checkpoints.manifest import Manifest, TrainCall


def entry(
    step: int,
    state: CheckpointState = CheckpointState.published,
    *,
    verified: bool | None = True,
    run_id: str = "run-1",
    ordinal: int = 1,
    kept: bool = False,
) -> CheckpointEntry:
    """One listed directory."""
    call = TrainCall(ordinal=ordinal, trainer_class="T", output_dir="out")
    manifest = Manifest(
        run_id=run_id, train_call=call, step=step, world_size=1, versions={}, files={}, kept=kept
    )
    return CheckpointEntry(
        path=Path(f"out/{run_id}/checkpoint-{step}"), step=step, state=state, size_bytes=1, modified_at=1.0,
        manifest=manifest if state is CheckpointState.published else None, verified=verified,
    )  # fmt: skip


def test_the_newest_verified_checkpoints_are_kept() -> None:
    """Per run and `train()` call."""
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


@given(entries=entries, keep=st.integers(1, 4), include_unusable=st.booleans())
def test_unverified_checkpoints_are_never_selected_and_each_run_keeps_its_newest(
    entries: list[CheckpointEntry], keep: int, include_unusable: bool
) -> None:
    """Property: each run keeps the requested number of verified checkpoints, or all it has."""
    selected = select_prunable(entries, keep=keep, include_unusable=include_unusable)
    for one in selected:
        is_verified = one.state is CheckpointState.published and one.verified is True
        assert is_verified or (
            include_unusable and one.state in (CheckpointState.partial, CheckpointState.rejected)
        )
    for run_id in ("run-1", "run-2"):
        verified = [one for one in entries if one.state is CheckpointState.published and one.verified]
        before = sorted(one.step for one in verified if one.path.parent.name == run_id)
        after = sorted(one.step for one in verified if one.path.parent.name == run_id and one not in selected)
        assert after == before[-keep:]


def test_the_best_checkpoint_is_kept() -> None:
    """A trainer may load it at the end."""
    assert select_prunable([entry(1), entry(2)], keep=1, best={"checkpoint-1"}) == []


def test_a_checkpoint_that_the_user_asked_for_is_kept() -> None:
    """In addition to the newest."""
    made = [entry(1), entry(2, kept=True), entry(3), entry(4)]
    assert [one.step for one in select_prunable(made, keep=1)] == [1, 3]
