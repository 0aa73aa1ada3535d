"""The ways in which a run can end: exit code, last line, what is on disk, and what the same command does
next.

The table in `docs/reference/campaigns.md` is made of `ENDS`; each row is a real run, and the same command
started once more.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support import quota
from support.full_disk import small_disk
from support.runs import SCRIPTS, Run, Runs
from support.whole_runs import PATCHED, kill_all, memory_of

from grpo_run.runtime.checkpoints.search import snapshot_directories

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "reference" / "campaigns.md"
DISK_BYTES = 100 << 20
SMALL_MEMORY_BYTES = 65 << 20
"""Less than a megabyte beyond what stays free in a file system in memory."""
HASTE = {"RETRY_SECONDS": 1.0, "WAIT_SECONDS": 3.0, "PATIENCE_SECONDS": 1.0}
LONG = {**HASTE, "WAIT_SECONDS": 120.0}
ONLY_IN_MEMORY = (
    "ran to its end at step 4, but … only in memory, … `grpo-run resume … writes what is in memory"
)
HAS_FINISHED = "has finished"
WROTE = "wrote … which was only in memory … has finished"
CONTINUED = "Finished at step 4 of 4"
LONGER = ("--save-steps", "6", "--max-steps", "8")
"""Arguments of a run that is stopped between two saves."""
CONTINUED_TO_8 = "Finished at step 8 of 8"
NO_SAVES = ("--settings", '{"save_strategy": "no"}')


@dataclass(frozen=True, kw_only=True)
class End:
    """One way to end, and the same command afterwards.

    Attributes:
        end: what happens, for the table.
        code: exit code of the launch; None for one that is killed.
        says: parts of its last line, in this order, separated by `…`.
        disk: what is in the output directory then: steps of checkpoints, and other names.
        do: what the script does, as of `tests/scripts/ends.py`.
        options, arguments: of grpo-run, and of the script.
        act: done from outside while it runs.
        before_again: done before the same command.
        again_code, again_says, again_disk: of the same command.
        patched: constants of the product that are shorter or longer than usual.
    """

    end: str
    code: int | None
    says: str
    disk: str
    do: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    act: Callable[[Run], None] | None = None
    before_again: Callable[[Run], None] = lambda run: None
    again: str = ""
    again_code: int = 0
    again_says: str = HAS_FINISHED
    again_disk: str = "2, 4"
    patched: Mapping[str, float] = field(default_factory=lambda: HASTE)


def make_room(run: Run) -> None:
    """Free the disk; the script fills it no more."""
    (run.cwd / "disk" / "ballast").unlink()
    (run.cwd / "quiet").touch()


def make_writable(run: Run) -> None:
    """Mount the disk for writing again."""
    subprocess.run(["mount", "-o", "remount,rw", str(run.cwd / "disk")], check=True, timeout=30)
    (run.cwd / "quiet").touch()


def raise_quota(run: Run) -> None:
    """The quota is not used up any more."""
    (run.cwd / "disk" / quota.MARKER).unlink()
    (run.cwd / "quiet").touch()


def lose_memory(run: Run) -> None:
    """As a restart of the machine does; the disk has room again."""
    shutil.rmtree(memory_of(run))
    make_room(run)


def correct(run: Run) -> None:
    """The script makes its mistake no more."""
    (run.cwd / "quiet").touch()


def until_waiting(run: Run) -> None:
    """Until the run waits for room."""
    deadline = time.monotonic() + 60
    while "waiting for room" not in run.printed():
        assert time.monotonic() < deadline, run.tail()
        time.sleep(0.05)


def make_room_in_time(run: Run) -> None:
    """While the run waits for it."""
    until_waiting(run)
    make_room(run)


def signal_the_wait(run: Run) -> None:
    """While the run waits for room."""
    until_waiting(run)
    run.send_signal(signal.SIGTERM)


def stop(run: Run) -> None:
    """After step 3, whose save is the stop's."""
    with run.held(after=3):
        run.until_step(3)
        run.send_signal(signal.SIGTERM)
        run.until_event("stop_requested")


def kill_everything(run: Run) -> None:
    """All processes, after step 3."""
    with run.held(after=3):
        run.until_step(3)
        kill_all(run)


ENDS = {
    "finished": End(
        end="the script ends, and has saved by its schedule", code=0,
        says="Finished at step 4 of 4, no faults. Last checkpoint: …/out/checkpoint-4.", disk="2, 4",
    ),
    "saved-model": End(
        end="the script ends with `trainer.save_model()`", do=("end=save:disk/out/final",), code=0,
        says="Finished …. The model is in …/out/final.", disk="2, 4, final", again_disk="2, 4, final",
    ),
    "saves-nothing": End(
        end='`save_strategy="no"`', arguments=NO_SAVES, code=0,
        says="Finished …. Last snapshot: …/snapshot-4.", disk="snapshot", again_disk="snapshot",
    ),
    "recovered": End(
        end="a rank is killed once", do=("step-3=once-kill",), code=0,
        says="Finished …, 1 fault recovered.", disk="2, 4",
    ),
    "hang-after-the-last-line": End(
        end="a thread that never ends is left after the last line, once", do=("end=once-thread",), code=0,
        says="Finished …", disk="2, 4",
    ),
    "full-before-the-first-save": End(
        end="disk full before the first save", do=("step-1=fill:disk",), code=93, says=ONLY_IN_MEMORY,
        disk="nothing; 2, 4 in memory", before_again=make_room, again_says=WROTE,
        again="with room, even with another variable: writes both",
    ),
    "full-between-saves": End(
        end="disk full between two saves", do=("saved-2=fill:disk",), code=93, says=ONLY_IN_MEMORY,
        disk="2; 4 in memory", before_again=make_room, again_says=WROTE,
        again="with room, even with another variable: writes 4",
    ),
    "full-still": End(
        end="the same, and the disk stays full", do=("saved-2=fill:disk",), code=93, says=ONLY_IN_MEMORY,
        disk="2; 4 in memory", again="waits again, and says the same", again_code=93,
        again_says="only in memory … writes what is in memory", again_disk="2; 4 in memory",
    ),
    "room-in-time": End(
        end="disk full, and room during the wait for it", do=("saved-2=fill:disk",), act=make_room_in_time,
        patched=LONG, code=0, says="Finished …. Last checkpoint: …/out/checkpoint-4.", disk="2, 4",
    ),
    "signal-during-the-wait": End(
        end="disk full, and SIGTERM during the wait for room", do=("saved-2=fill:disk",), act=signal_the_wait,
        patched=LONG, code=93, says=ONLY_IN_MEMORY, disk="2; 4 in memory", before_again=make_room,
        again_says=WROTE, again="with room: writes 4",
    ),
    "memory-lost": End(
        end="disk full, then the machine restarts", do=("saved-2=fill:disk",), code=93, says=ONLY_IN_MEMORY,
        disk="2; 4 in memory", before_again=lose_memory,
        again="with room: says that it is gone, trains again from step 2", again_says=CONTINUED,
    ),
    "full-nothing-scheduled": End(
        end='disk full, `save_strategy="no"`', arguments=NO_SAVES, do=("step-3=fill:disk",), code=93,
        says=ONLY_IN_MEMORY, disk="nothing; snapshot in memory", before_again=make_room, again_says=WROTE,
        again="with room: writes the snapshot", again_disk="snapshot",
    ),
    "full-own-save": End(
        end="disk full in the script's own `save_model`", do=("end=fill:disk", "end=save:disk/out/final"),
        code=93, says="No space left on device … Gave up: the script could not start for", disk="2, 4",
        before_again=make_room, again="with room: runs the rest of the script",
        again_says="Finished at step 4 of 4, … The model is in …/out/final.", again_disk="2, 4, final",
    ),
    "full-without-memory": End(
        end="disk full in the last save, no snapshots (`--snapshot-dir off`)",
        options=("--snapshot-dir", "off"), do=("step-4=fill:disk",), code=93,
        says="No space left on device … Gave up: the same failure occurred again", disk="2",
        before_again=make_room, again="with room: continues from step 2", again_says=CONTINUED,
    ),
    "skipped-without-memory": End(
        end="disk full in one save, no snapshots", options=("--snapshot-dir", "off"),
        do=("step-2=fill:disk", "step-3=room:disk"), arguments=("--save-steps", "1"), code=93,
        says=(
            "ran to its end at step 4, but …/out/checkpoint-2, which the script scheduled, is not on disk: …"
            " Last checkpoint: …/out/checkpoint-4."
        ),
        disk="1, 3, 4", again="nothing is left to write", again_code=93, again_says="is not on disk",
        again_disk="1, 3, 4",
    ),
    "memory-full": End(
        end="/dev/shm full", options=("--snapshot-dir", "memory"), code=0,
        says="no memory for a snapshot … Finished …. Last checkpoint: …/out/checkpoint-4.", disk="2, 4",
    ),
    "quota": End(
        end="quota used up", do=("saved-2=quota:disk",), code=93,
        says="only in memory … Disk quota exceeded … writes what is in memory", disk="2; 4 in memory",
        before_again=raise_quota, again_says=WROTE, again="with quota: writes 4",
    ),
    "read-only": End(
        end="the disk becomes read-only", do=("saved-2=read-only:disk",), code=93,
        says="only in memory … Read-only file system … writes what is in memory", disk="2; 4 in memory",
        before_again=make_writable, again_says=WROTE, again="writable again: writes 4",
    ),
    "stopped": End(
        end="SIGTERM between two saves", act=stop, arguments=LONGER, code=75,
        says="Stopped at step … Run the same command to resume.", disk="snapshot", again="continues",
        again_says=CONTINUED_TO_8, again_disk="6, 8",
    ),
    "stopped-on-a-full-disk": End(
        end="the same while the disk is full", do=("step-1=fill:disk",), act=stop, arguments=LONGER, code=75,
        says="Stopped at step … only in memory … On this machine, the same command continues from it.",
        disk="nothing; snapshot in memory", before_again=make_room, again="with room: continues from memory",
        again_says=CONTINUED_TO_8, again_disk="6, 8",
    ),
    "killed": End(
        end="all processes killed between two saves", options=("--snapshot-every", "1"), act=kill_everything,
        arguments=LONGER, code=None, says="", disk="nothing; snapshot in memory",
        again="continues from memory", again_says=CONTINUED_TO_8, again_disk="6, 8",
    ),
    "gave-up": End(
        end="the script raises the same exception again", do=("saved-2=raise",), code=93,
        says="a mistake of the script … Gave up:", disk="2", before_again=correct,
        again="corrected: continues", again_says=CONTINUED,
    ),
    "out-of-memory": End(
        end="out of GPU memory, whatever is changed", do=("saved-2=oom",), code=93, says="out of memory",
        disk="2", before_again=correct, again="corrected: continues", again_says=CONTINUED,
    ),
    "usage": End(
        end="an option that does not exist", options=("--no-such-option",), code=2,
        says="no option --no-such-option", disk="nothing", again="the same", again_code=2,
        again_says="no option --no-such-option", again_disk="nothing",
    ),
}  # fmt: skip
DEFAULT = ("room-in-time", "skipped-without-memory")
"""The rows that `make test` runs."""
CASES = [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.full, id=name) for name in ENDS]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a small disk."""
    with small_disk(tmp_path / "disk", DISK_BYTES) as made:
        yield made.folder
        if os.path.ismount(tmp_path / "disk"):
            subprocess.run(["mount", "-o", "remount,rw", str(tmp_path / "disk")], check=False, timeout=30)


@pytest.fixture
def memory(tmp_path: Path, disk: Path) -> Iterator[Path]:
    """Mount a file system in memory that is too small for a snapshot."""
    with small_disk(tmp_path / "memory", SMALL_MEMORY_BYTES) as made:
        yield made.folder


@pytest.mark.parametrize("name", CASES)
def test_the_end_and_the_same_command_are_as_the_table_says(
    name: str, disk: Path, runs: Runs, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Code, last line and disk, twice."""
    row = ENDS[name]
    environment = {"TEST_DRAINS": json.dumps(dict(row.patched))}
    if name == "memory-full":
        request.getfixturevalue("memory")
    if name == "quota":
        environment |= quota.environment(tmp_path / "quota.so", tmp_path / "disk")
    run = runs(
        *row.options, "--nproc-per-node", "1", str(SCRIPTS / "ends.py"), "--output-dir", "disk/out",
        "--max-steps", "4", "--save-steps", "2", *row.arguments, *(f"--do={one}" for one in row.do),
        program=PATCHED, environment=environment, cold=True if name == "quota" else None,
    ).start()  # fmt: skip
    if row.act is not None:
        row.act(run)
    if row.code is not None:
        run.ended(row.code)
    assert contains(run.printed(), row.says), run.tail()
    assert on_disk(run) == row.disk, run.tail()
    row.before_again(run)
    before = len(run.printed())
    if "another variable" in row.again:
        run.environment["SEED"] = "5"
    run.start().ended(row.again_code)
    assert contains(run.printed()[before:], row.again_says), run.tail()
    assert on_disk(run).removesuffix(", snapshot") == row.again_disk, run.tail()


def contains(text: str, parts: str) -> bool:
    """Whether all parts, which `…` separates, are in the text in this order."""
    position = 0
    for part in parts.split("…"):
        position = text.find(part.strip(), position)
        if position < 0:
            return False
    return True


def on_disk(run: Run) -> str:
    """Describe the output directory and the memory of the run."""
    output = run.cwd / "disk" / "out"
    steps = sorted(path.parent.name.rpartition("-")[2] for path in output.glob("checkpoint-*/MANIFEST.json"))
    names = [*steps, *(["final"] if (output / "final" / "training_args.bin").is_file() else [])]
    if any(any(place.glob("snapshot-*/MANIFEST.json")) for place in snapshot_directories(output)):
        names.append("snapshot")
    found = ", ".join(names) or "nothing"
    kept = in_memory(run)
    return f"{found}; {kept} in memory" if kept else found


def in_memory(run: Run) -> str:
    """What only memory has: checkpoints by number, and a snapshot."""
    if not (run.directory / "run.json").is_file():
        return ""
    area = json.loads((run.directory / "run.json").read_bytes()).get("snapshot_directory")
    staged = [
        json.loads(file.read_bytes())
        for file in (Path(area).glob("*/STAGED.json") if area else ())
        if not (file.parent / "DRAINED").exists()
    ]
    wanted = [one for one in staged if one["scheduled"] or one["urgent"]] or staged[:1]
    return ", ".join(sorted(str(one["step"]) if one["scheduled"] else "snapshot" for one in wanted))


def test_the_documentation_has_the_table() -> None:
    """Every row, as it is tested."""
    assert table() in PAGE.read_text(encoding="utf-8"), f"put this into {PAGE}:\n{table()}"


def table() -> str:
    """Return the table of the documentation."""
    lines = ["| end | code | says | on disk then | the same command |", "|---|---|---|---|---|"]
    for row in ENDS.values():
        code = "" if row.code is None else row.code
        again = f"{row.again}; " if row.again else ""
        lines.append(
            f"| {row.end} | {code} | {row.says} | {row.disk} | {again}{row.again_code}: {row.again_says}; on"
            f" disk: {row.again_disk} |"
        )
    return "\n".join(lines)
