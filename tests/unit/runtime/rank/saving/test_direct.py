"""A direct save is published after all ranks have written; older checkpoints are removed after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.saving import Guarded, Trainer
from support.vote_groups import ScriptedVotes

from grpo_run.runtime.checkpoints.manifest import TrainCall
from grpo_run.runtime.rank.saving import _direct as direct_module
from grpo_run.runtime.rank.saving._reservation import SaveFlags
from grpo_run.runtime.snapshots.headroom import DISK_RESERVE_BYTES

Events = Callable[[], list[dict[str, Any]]]


def test_all_ranks_use_the_free_space_that_rank_zero_finds(
    direct: Guarded, session: Any, call: TrainCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks may see another disk; a rank that started a save alone would wait forever."""
    direct.save(5)
    session.is_main = False
    other = Guarded(Trainer(Path(call.output_dir)), session, call)
    monkeypatch.setattr(direct_module.shutil, "disk_usage", None)
    short = SaveFlags(non_finite=False, disk_short=True)
    session.votes = ScriptedVotes(lambda values: short.as_values())
    assert not other.save(6).exists()
    assert session.votes.sent == [SaveFlags(non_finite=False).as_values()]


def test_too_little_disk_space_is_warned_about_at_the_start(
    tmp_path: Path, session: Any, call: TrainCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no warning if the space is enough."""
    one = 3 * 10 * 4  # a layer of 10 trained float32 numbers
    for free, warnings in ((DISK_RESERVE_BYTES + 3 * one - 1, 1), (DISK_RESERVE_BYTES + 3 * one, 0)):
        session.notified.clear()
        monkeypatch.setattr(
            direct_module.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free)
        )
        trainer = Trainer(tmp_path / "out")
        trainer.args.save_total_limit = 2
        Guarded(trainer, session, call)
        assert len(session.notified) == warnings
        assert all("0.0" not in text for text in session.notified)
