"""What the live page and `grpo-run top` show of a run, as plain data.

Called by `feed.py` for every reading of a run. Texts are cleaned here, once for the browser and the terminal.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from grpo_run.dashboards.clean_text import clean
from grpo_run.dashboards.run_facts import MAX_LABEL, facts_of, memory_of
from grpo_run.runtime.history.recovery import Recovery
from grpo_run.runtime.history.status import RunStatus

SHOWN_INCIDENTS = 100
ENDED_TONES = {"finished": "good", "stopped": "quiet", "failed": "bad", "unknown": "bad"}
CONFIRMED = "A fault was found, and its evidence is being written."
HANDLING = frozenset({"collecting", "recovering"})
"""States in which a fault is being handled."""


def view(status: RunStatus, checkpoints: Iterable[Mapping[str, Any]], now: float) -> dict[str, Any]:
    """Return what is shown of a run, as JSON values.

    Args:
        status: one reading.
        checkpoints: the last ones that were published, as `RunCurves` keeps them.
        now: seconds since the epoch.
    """
    history = status.history
    live = status.supervisor_pid is not None
    until = now if live else None
    sentences, facts = _verdict(status), facts_of(status, until)
    tone = _tone(status)
    numbered = [{"number": number, **one} for number, one in enumerate(facts["incidents"], 1)]
    return facts | {
        "live": live,
        "tone": tone,
        "sentence": clean(sentences[0]),
        "also": clean(" ".join(sentences[1:])),
        "train_call": history.train_call,
        "counts_steps": history.counts_steps,
        "step_seconds": history.step_seconds(),
        "remaining_seconds": status.remaining_seconds,
        "reward": history.reward,
        "loss": history.loss,
        "wall_seconds": None if history.wall.first is None else history.wall.elapsed_seconds(until),
        "last_event_at": history.wall.last,
        "snapshot_step": history.snapshot_step,
        "trouble": None if history.checkpoint_trouble is None else clean(history.checkpoint_trouble),
        "facts": [f"{name.capitalize()}: {text}." for name, text in history.facts().items()],
        "host_memory": _host_memory(status),
        "ranks": _ranks(status),
        "hosts": [clean(host.line) for host in status.hosts],
        # while something is wrong, nothing else is to be read
        "advice": [] if tone in ("bad", "warn") else list(map(clean, history.pace())),
        "incidents": numbered[-SHOWN_INCIDENTS:][::-1],
        "checkpoints": [{**one, "path": clean(one["path"])} for one in checkpoints],
    }


def _verdict(status: RunStatus) -> list[str]:
    """The sentences about a run, the most important one first: its fault until it has recovered."""
    last = status.history.recoveries[-1] if status.history.recoveries else None
    if last is None or not _is_open(status, last):
        return [CONFIRMED, status.summary] if status.state == "collecting" else [status.summary]
    if last.sentence.rstrip(".") in status.summary:
        return [status.summary]
    return [last.sentence, status.summary]


def _is_open(status: RunStatus, fault: Recovery) -> bool:
    """Whether the run has not continued after its last fault."""
    if status.history.exit_code is not None:
        return fault.gave_up
    return fault.recovery_seconds is None


def _tone(status: RunStatus) -> str:
    """How a state is colored: `good`, `bad`, `warn`, `busy` or `quiet`."""
    ended = ENDED_TONES.get(status.state)
    if ended is not None:
        return ended
    last = status.history.recoveries[-1] if status.history.recoveries else None
    if status.state in HANDLING or (last is not None and _is_open(status, last)):
        return "bad"
    if status.wait is not None or status.state == "suspect" or status.history.checkpoint_trouble:
        return "warn"
    return "good" if status.state == "running" else "busy"


def _ranks(status: RunStatus) -> list[dict[str, Any]]:
    newest = max((slot.voted_step for slot in status.slots if slot is not None), default=0)
    voted = [slot for slot in status.slots if slot is not None and slot.voted_step == newest > 0]
    first = min((slot.voted_at_seconds for slot in voted), default=0.0)
    awaited = status.awaited.rank if status.awaited is not None and status.wait is not None else None
    waiters = status.awaited.waiters if awaited is not None and status.awaited is not None else ()
    rows = []
    for fields, slot in zip(status.as_json()["ranks"], status.slots, strict=True):
        local = fields["local_rank"]
        if slot is None:
            why = "has not started yet" if status.state == "starting" else "cannot be observed"
            rows.append({"local_rank": local, "observable": False, "phase": why})
            continue
        memory = status.memory[local] if local < len(status.memory) else None
        rows.append(
            {
                name: fields[name]
                for name in ("local_rank", "observable", "rank", "pid", "state", "step", "phase_seconds")
            }
            | {"phase": clean(fields["callback"] or fields["phase"] or fields["state"], MAX_LABEL)}
            | {
                # how much later than the first rank it has voted on the newest step
                "late_seconds": round(slot.voted_at_seconds - first, 4) if slot in voted else None,
                "awaited": slot.rank == awaited,
                "waits": slot.rank in waiters,
                "memory": memory_of(memory),
            }
        )
    return rows


def _host_memory(status: RunStatus) -> dict[str, Any] | None:
    nearest = None if status.host_memory is None else status.host_memory.nearest
    return None if nearest is None else {"name": nearest.name, "fraction": nearest.fraction}
