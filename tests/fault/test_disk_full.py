"""A full disk leaves no partial checkpoint visible, loses no work and does not stop training."""

from __future__ import annotations

import random
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from support.full_disk import SmallDisk, small_disk
from support.references import undisturbed
from support.runs import SCRIPTS, Run, Runs, digest
from support.slots import snapshot
from support.torture import contents, resume, unexpected_files, verified_checkpoints
from support.whole_runs import PATCHED, kill_all, resumed_at

from grpo_run.runtime.snapshots._drain_messages import DrainFailed, DrainPublished, DrainRequest
from grpo_run.runtime.snapshots._drain_worker import DISK_RESERVE_BYTES, handle_request
from grpo_run.runtime.snapshots.area import StagingArea
from grpo_run.runtime.snapshots.slot import StagingSlot

DISK_BYTES = DISK_RESERVE_BYTES + (24 << 20)
RETRY_SECONDS, STALL_SECONDS = 1.0, 20.0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """Mount a file system with space for a few tiny checkpoints above the reserve."""
    with small_disk(tmp_path / "disk", DISK_BYTES) as made:
        yield made


def stage(slot: StagingSlot, output: Path, step: int, dice: random.Random) -> int:
    """Write a snapshot of about 1 MB in several files; return its size in bytes."""
    staged = snapshot(output, step)
    slot.begin_snapshot()
    folder = slot.files / staged.folder
    sizes = {
        "plain-0.bin": 150_000,
        "model.safetensors": 500_000,
        "optimizer.pt": 300_000,
        "rng/state.pth": 50_000,
    }
    for name, size_bytes in sizes.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(dice.randbytes(size_bytes))
    slot.prepare_snapshot(staged)
    slot.record_files(staged)
    slot.complete_snapshot()
    return sum(sizes.values())


@pytest.mark.parametrize("events", [10, pytest.param(30, marks=pytest.mark.full)])
@pytest.mark.parametrize("older_of_the_same_step", [False, True])
def test_disk_full_at_any_byte_keeps_existing_checkpoints(
    disk: SmallDisk, tmp_path: Path, older_of_the_same_step: bool, events: int
) -> None:
    """So many times, the disk is full before a drain or fills up during one.

    With free space again, the drain succeeds.
    """
    dice, output = random.Random(50 + older_of_the_same_step), disk.folder
    memory = Path(tempfile.mkdtemp(prefix="grpo-run-full-", dir="/dev/shm"))
    try:
        staging = StagingArea(memory)
        stage(staging.slots[0], output, 4, dice)
        assert isinstance(handle_request(staging, DrainRequest(slot=0), lambda count: None), DrainPublished)
        older, outcomes = contents(output / "checkpoint-4"), []
        reasons: Counter[str] = Counter()
        for event in range(events):
            step = 4 if older_of_the_same_step else 6
            total = stage(staging.slots[1], output, step, dice)
            offset, left = dice.randrange(1, total), dice.choice([0, 0, dice.randrange(1, 300_000)])
            while_writing = event % 3 > 0
            if not while_writing:
                disk.leave(dice.randrange(0, DISK_RESERVE_BYTES + total))

            def report(
                written_bytes: int, offset: int = offset, left: int = left, fills: bool = while_writing
            ) -> None:
                if fills and written_bytes >= offset:
                    disk.leave(left)

            reply = handle_request(staging, DrainRequest(slot=1), report)
            where = f"event {event}: {reply}"
            if isinstance(reply, DrainFailed):
                assert reply.full, where
                assert not reply.broken, where
                assert verified_checkpoints(output) == {"checkpoint-4": older}, where
                assert not unexpected_files(output), where
                assert not staging.slots[1].drained, where
                assert resume(output) == output / "checkpoint-4", where
                reasons[reply.reason.partition("(")[0][:40] if while_writing else "before"] += 1
            outcomes.append(isinstance(reply, DrainFailed))
            disk.empty()
            again = handle_request(staging, DrainRequest(slot=1), lambda count: None)
            assert isinstance(again, DrainPublished), f"{where}: {again}"
            there = verified_checkpoints(output)
            assert set(there) == {"checkpoint-4", f"checkpoint-{step}"}, where
            assert not unexpected_files(output), where
            assert there[f"checkpoint-{step}"] != older or step != 4, where
            if older_of_the_same_step:
                older = there["checkpoint-4"]
            else:
                shutil.rmtree(output / "checkpoint-6")
        assert sum(outcomes) > 0.7 * len(outcomes), "the disk was rarely full"
        assert len(reasons) > 1, "expected failures before the drain and in its files"
        kind = (
            "over a checkpoint of the same step" if older_of_the_same_step else "beside an older checkpoint"
        )
        print(
            f"\n| disk full at a random byte, {kind} | {sum(outcomes)} of {len(outcomes)} refused | no"
            " corrupt checkpoint, always a loadable one |"
        )
    finally:
        shutil.rmtree(memory)


def test_run_continues_on_a_full_disk(disk: SmallDisk, runs: Runs, tmp_path: Path) -> None:
    """The run reports the disk, trains on, recovers a killed rank from memory, and drains later."""
    arguments = ("--max-steps", "40", "--save-steps", "4", "--save-total-limit", "2")
    run = runs(
        "--nproc-per-node", "2", "--snapshot-every", "1", str(SCRIPTS / "grpo.py"),
        "--output-dir", str(disk.folder), *arguments, "--step-seconds", "0.1", program=PATCHED,
        environment={"TEST_DRAINS": f'{{"RETRY_SECONDS": {RETRY_SECONDS}}}'},
    ).start()  # fmt: skip
    run.until(lambda events: any(e["event"] == "checkpoint_published" and e["step"] >= 4 for e in events))
    disk.leave(0)  # to the last byte: other files in the output directory must not end the run either
    failed = run.until_event("checkpoint_failed")
    assert failed["cause"] == "disk_full"
    run.until_step(failed["step"] + 11)  # every slot holds a checkpoint that the script asked for
    run.kill(1)
    run.until_event("attempt_started", attempt=1)
    run.until_event("train_started", attempt=1, rank=0)
    committed = max(event["step"] for event in run.events("step_committed") if event["attempt"] == 0)
    began = resumed_at(run, 1)
    assert began is not None
    assert began >= committed - 1, run.tail()
    assert run.events("resume_chosen")[-1]["in_memory"], run.tail()
    run.until_step(began + 2)
    assert run.status()["checkpoint_trouble"]
    assert not [event for event in run.events("checkpoint_published") if event["step"] >= began]
    emptied_at = time.time()
    disk.empty()
    back = run.until(
        lambda events: [e for e in events if e["event"] == "checkpoint_published" and e["time"] > emptied_at]
    )  # fmt: skip
    assert not run.events("run_ended"), "free space was used only at the end of the run"
    assert back[0]["attempt"] == 1
    run.ended()
    assert digest(disk.folder) == undisturbed("grpo.py", 40)
    assert not run.status()["checkpoint_trouble"]
    assert set(verified_checkpoints(disk.folder)) == {"checkpoint-36", "checkpoint-40"}


def test_run_directory_on_a_full_disk_is_reported_by_metrics(disk: SmallDisk, runs: Runs) -> None:
    """Training continues without journal, evidence and logs, and the metrics show the loss."""
    run = runs(
        "--nproc-per-node", "2", "--snapshot-every", "1", "--show-ranks", "all", str(SCRIPTS / "grpo.py"),
        "--output-dir", str(disk.folder), "--max-steps", "32", "--save-steps", "4",
        "--save-total-limit", "2", "--step-seconds", "0.2",
        name="disk/run", metrics="127.0.0.1:0", program=PATCHED,
        environment={"TEST_DRAINS": f'{{"RETRY_SECONDS": {RETRY_SECONDS}}}'},
    ).start()  # fmt: skip
    run.until_event("checkpoint_published")
    disk.leave(0)
    wait_for(run, lambda seen: seen["grpo_checkpoint_trouble"] == 1 and seen["grpo_journal_lost_total"] > 0)
    run.kill(1)
    step = wait_for(run, lambda seen: seen["grpo_attempts_total"] == 2)["grpo_step"]
    wait_for(run, lambda seen: seen["grpo_step"] > step + 2)
    disk.empty()
    run.ended()
    assert set(verified_checkpoints(disk.folder)) == {"checkpoint-28", "checkpoint-32"}


def test_start_on_a_full_disk_is_refused_and_keeps_snapshots(disk: SmallDisk, runs: Runs) -> None:
    """The launch prints one line and exits with 2.

    With free space, the same command resumes from the snapshot in memory.
    """
    run = runs(
        "--nproc-per-node", "2", "--snapshot-every", "1", str(SCRIPTS / "grpo.py"), "--output-dir",
        str(disk.folder), "--max-steps", "12", "--save-steps", "4", "--step-seconds", "0.2", name="disk/run",
    )  # fmt: skip
    run.start().until_step(7)
    kill_all(run)
    committed = max(event["step"] for event in run.events("step_committed"))
    disk.leave(0)
    before = len(run.output.read_text())
    code = run.start().wait()
    assert code == 2, run.tail()
    disk.empty()
    run.start().ended()
    printed = run.output.read_text()[before:]
    assert "disk" in printed.splitlines()[0]
    assert resumed_at(run, 1) in (committed - 1, committed)
    assert set(verified_checkpoints(disk.folder)) >= {"checkpoint-4", "checkpoint-12"}


def wait_for(run: Run, condition: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """Wait until the run's metrics, summed up by name without labels, satisfy `condition`; return them."""
    address = re.search(r"http://[\d.]+:\d+/metrics", run.output.read_text())
    assert address is not None, run.tail()
    deadline = time.monotonic() + 60.0
    while True:
        assert run.process.poll() is None, run.tail()
        assert time.monotonic() < deadline, run.tail()
        with urlopen(address[0], timeout=5.0) as handle_request:
            lines = handle_request.read().decode().splitlines()
        seen = {}
        for line in lines:
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                seen[name.partition("{")[0]] = float(value)
        if condition(seen):
            return seen
        time.sleep(0.2)
