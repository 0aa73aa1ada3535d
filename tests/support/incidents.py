"""A run directory with one incident as the supervisor writes it: rank 1 of four called another collective."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grpo_run.runtime.history.journal import Journal
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.watchdog.evidence.stacks import Frame, Stack, format_stack_groups, group_by_stack
from support.journal import event

AT = 1_790_000_000.0
SENTENCE = (
    "Rank 1 called all_gather at train.py:88 while ranks 0, 2 and 3 wait in all_reduce at train.py:120,"
    " step 41."
)
HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)> & \"quoted\" \ud800"
SITE = "/venv/lib/python3.11/site-packages"


def location(line: int, function: str) -> dict[str, Any]:
    """Return a location in the user's script."""
    return {"file": "/home/me/train.py", "line": line, "function": function}


def verdict(**changes: Any) -> dict[str, Any]:
    """Return the content of `verdict.json`."""
    return {
        "schema": 1,
        "cause": "collective_mismatch",
        "culprits": [1],
        "phase": "reward",
        "step": 41,
        "confidence": "proved",
        "sentence": SENTENCE,
        "location": location(88, "reward"),
        "waiters": [0, 2, 3],
        "locations": {
            "0": location(120, "<module>"),
            "1": location(88, "reward"),
            "2": location(120, "<module>"),
            "3": location(120, "<module>"),
        },
        "mismatch": (
            "group 0, no. 1207: all_gather [8] Float on rank 1, all_reduce [3, 4] Float on ranks 0, 2, 3"
        ),
        "tried": [],
        "advice": ["Call all_gather on every rank: move it out of the branch at train.py:86."],
        "traceback": None,
        "missing_evidence": ["rank 3: no native stack: py-spy: no answer within 2.5 s"],
        **changes,
    }


def phase_memory(*, has_device: bool) -> dict[str, Any]:
    """What a rank has measured of its memory."""
    own = {
        "readings": 3, "peak_allocated_bytes": 73 * 1024**3, "peak_reserved_bytes": 76 * 1024**3,
        "allocated_bytes": 31 * 1024**3, "reserved_bytes": 77 * 1024**3, "inactive_split_bytes": 2 * 1024**3,
        "retries": 17, "peak_resident_bytes": 9 * 1024**3, "resident_bytes": 8 * 1024**3,
    }  # fmt: skip
    return {"has_device": has_device, "phases": {"forward_backward": own}}


def write_incident(root: Path, name: str = "0001-collective_mismatch", **changes: Any) -> RunDirectory:
    """Write `root/runs/night` with one incident that was recovered; `changes` are fields of its verdict."""
    run = RunDirectory(path=root / "runs" / "night")
    run.create()
    run.write_run({"run_id": "night"})
    incident = run.incidents / name
    for folder in ("stacks", "collectives", "memory"):
        (incident / folder).mkdir(parents=True, mode=0o700)
    (incident / "verdict.json").write_text(json.dumps(verdict(**changes)))
    (incident / "timeline.json").write_text(json.dumps(timeline()))
    (incident / "stacks" / "folded.txt").write_text(folded())
    for rank in range(4):
        (incident / "memory" / f"rank{rank}.status").write_text(
            f"Name:\tpython\nVmHWM:\t{9_600_000 + 310_000 * rank} kB\nVmRSS:\t{8_100_000 + 220_000 * rank}"
            " kB\n"
        )
        notes = [note(rank, sequence) for sequence in range(1196, 1208)]
        (incident / "collectives" / f"rank{rank}.notes.json").write_text(json.dumps(notes))
    (incident / "memory" / "node.txt").write_text("MemTotal: 131072000 kB\nMemAvailable: 88000000 kB\n")
    (incident / "memory" / "phases.json").write_text(
        json.dumps({str(rank): phase_memory(has_device=rank != 3) for rank in range(4)})
    )
    devices = [
        {
            "index": index,
            "used_bytes": (61 + index) * 1024**3,
            "total_bytes": 80 * 1024**3,
            "processes": [{"pid": 4200 + index, "used_bytes": (60 + index) * 1024**3}],
        }
        for index in range(4)
    ]
    (incident / "memory" / "gpu.json").write_text(json.dumps({"devices": devices}))
    write_journal(run, incident)
    lines = run.journal.read_text().splitlines()
    (incident / "events.jsonl").write_text("\n".join(lines[:-4]) + "\n")
    return run


def timeline() -> dict[str, Any]:
    """Return a timeline: three steps, then rank 1 in its reward function and the others in
    forward_backward.
    """
    ranks: dict[str, list[list[Any]]] = {}
    for rank in range(4):
        spans: list[list[Any]] = []
        at = -21.0
        for length, phase in [
            (0.5, "data"),
            (3.1, "generate"),
            (0.9 + 0.1 * rank, "reward"),
            (2.0 - 0.1 * rank, "forward_backward"),
            (0.4, "optimizer"),
            (0.1, "vote"),
        ] * 2:
            spans.append([phase, round(at, 3), round(at + length, 3)])
            at += length
        spans += [["data", at, at + 0.5], ["generate", at + 0.5, at + 3.4], ["reward", at + 3.4, None]]
        if rank != 1:
            spans[-1][2] = at + 4.5
            spans.append(["forward_backward", at + 4.5, None])
        ranks[str(rank)] = spans
    return {"ranks": ranks, "now": 0.0}


def folded() -> str:
    """Return folded stacks in which rank 1 differs from the others."""

    def stack(*frames: tuple[str, int, str]) -> list[Stack]:
        return [Stack("MainThread", tuple(Frame(*frame) for frame in frames), True)]

    script = "/home/me/train.py"
    library = f"{SITE}/torch/distributed/distributed_c10d.py"
    trainer = f"{SITE}/trl/trainer/grpo_trainer.py"
    waiting = stack((library, 2810, "all_reduce"),
    (f"{SITE}/torch/distributed/c10d_logger.py", 81, "wrapper"),
                    (trainer, 1204, "_generate_and_score_completions"),
                    (script, 120, "<module>"))  # fmt: skip
    alone = stack((library, 3702, "all_gather"), (script, 88, "reward"), (trainer, 1011, "_calculate_rewards"),  # noqa: E501
                  (trainer, 1204, "_generate_and_score_completions"), (script, 120, "<module>"))  # fmt: skip
    return format_stack_groups(group_by_stack({0: waiting, 1: alone, 2: waiting, 3: waiting}))


def note(rank: int, sequence: int) -> dict[str, Any]:
    """Return a rank's record of one collective: rank 1 differs in the last one, rank 3 has not reached it."""
    differs = rank == 1 and sequence == 1207
    last = sequence == 1207
    return {
        "group": "0",
        "sequence": sequence if not (rank == 3 and last) else 1195,
        "operation": "all_gather" if differs else "all_reduce",
        "sizes": [[8]] if differs else [[3, 4]],
        "dtypes": ["Float"],
        "progress": "waiting" if last else "completed",
        "step": 41,
        "at": "train.py:88" if differs else "train.py:120",
    }


def write_journal(run: RunDirectory, incident: Path) -> None:
    """Write a few steps, the incident, the restart and the next committed step."""
    clock = iter(
        [AT - 60 + 4 * number for number in range(12)] + [AT - 5.0, AT, AT + 0.1, AT + 0.2, AT + 1.4]
    )
    now = [AT]
    journal = Journal(run.journal, "night", wall=lambda: now[0], monotonic=lambda: now[0] - AT)

    def write(name: str, **fields: Any) -> None:
        now[0] = next(clock)
        journal.write(event(name, **fields))

    write("run_started")
    journal.attempt = 0
    write("attempt_started", world_size=4)
    write("train_started", rank=0, step=0, train_call=1, target_steps=100)
    for step in range(34, 42):
        write("step_committed", step=step, train_call=1)
    write("checkpoint_published", step=40, path="/home/me/out/checkpoint-40", verified=True, train_call=1)
    write("suspicion", rank=1, step=41, text="ranks 0, 2, 3 wait in a collective that rank 1 has not called")
    write(
        "incident", step=41, cause="collective_mismatch", culprit=1, signature="s", train_call=1,
        incident=str(incident), detection_seconds=0.31, failed_at=AT - 0.31,
    )  # fmt: skip
    write("action", action="restart", reason="first failure at this place")
    write("train_started", rank=0, step=40, train_call=1, target_steps=100)
    write("step_committed", step=41, train_call=1)
