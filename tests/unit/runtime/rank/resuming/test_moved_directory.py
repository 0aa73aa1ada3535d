"""Two names are of one directory only with evidence that each start makes the name anew."""

from __future__ import annotations

import tempfile

import pytest

from grpo_run.runtime.history.train_calls import CallDirectory
from grpo_run.runtime.rank.resuming.identification import is_same_directory

FIRST, SECOND = 1_790_000_000.0, 1_790_007_200.0  # 2026-09-21 14:13:20 and 16:13:20 UTC


def directory(path: str, at: float, pid: int = 0) -> CallDirectory:
    """A directory whose name was chosen within 20 seconds."""
    return CallDirectory(path=path, not_before=at, not_after=at + 20.0, pid=pid)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("/o/out-2026-09-21_14-13-25", "/o/out-2026-09-21_16-13-25"),
        ("/o/out-20260921-141325", "/o/out-20260921-161325"),
        ("/o/1413/out", "/o/1613/out"),
        ("/o/Sep21_14-13-25_host3", "/o/Sep21_16-13-25_host3"),
        ("/o/out-1790000005", "/o/out-1790007205"),
        ("/o/2026-09-21_14-13-25.123456", "/o/2026-09-21_14-13-31.654321"),
        ("/o/out-1790000005.123", "/o/out-1790007205.9"),
        ("/o/out-0213pm", "/o/out-0413pm"),
        ("/o/13f1c0de-0000-4000-8000-00000000aaaa", "/o/9a2b3c4d-0000-4000-8000-00000000bbbb"),
        ("/o/run-9f8e7d6c", "/o/run-1a2b3c4d"),
        (f"{tempfile.gettempdir()}/tmpab12_d9z", f"{tempfile.gettempdir()}/tmp0x_yzzzz"),
        ("/o/out-4711", "/o/out-4800"),
        ("/o/a-1790000005/sft-1790000005", "/o/a-1790007205/sft-1790007205"),
    ],
)
def test_a_time_a_random_part_or_a_process_id_is_the_same_directory(old: str, new: str) -> None:
    """In the usual notations, in local time or UTC."""
    later = FIRST + 6 if "14-13-31" in new else SECOND
    assert is_same_directory(directory(old, FIRST, pid=4711), directory(new, later, pid=4800))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("/o/fold-1", "/o/fold-2"),
        ("/o/seed-1234", "/o/seed-5678"),
        ("/o/lr-0.001", "/o/lr-0.0001"),
        ("/o/math", "/o/code"),
        ("/o/out-2026-09-21_14-13-25", "/o/out-2025-01-02_03-04-05"),
        ("/o/sft-1790000005", "/o/grpo-1790007205"),
        ("/o/out", "/o/out/1790007205"),
        ("/o/checkpoint-1500", "/o/checkpoint-2000"),
        ("/o/out", "/o/out"),
        ("/o/1790000005-fold1", "/o/1790007205-fold2"),
        ("/o/may-model", "/o/jan-model"),
        ("/o/20260921-fold1", "/o/20260921-fold2"),
        ("/o/2026-09-21_14-13-25-fold1", "/o/2026-09-21_16-13-25-fold2"),
        ("/o/2026-09-21-12", "/o/2026-09-21-13"),
        ("/o/aaaaaaaa", "/o/bbbbbbbb"),
    ],
)
def test_other_differences_are_other_directories(old: str, new: str) -> None:
    """Numbers of folds, seeds and settings; a time at which the name was not chosen."""
    assert not is_same_directory(directory(old, FIRST), directory(new, SECOND))
