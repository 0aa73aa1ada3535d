"""The lifecycle of a run: every state, every event and every legal transition, in one table.

    starting    ranks are being started; no step has been committed in this attempt yet
    running     steps are being committed, or the script takes optimizer steps by itself
    suspect     a possible fault is being confirmed; no evidence has been requested yet
    collecting  a fault is confirmed; evidence is being written, and nothing has been killed
    recovering  the ranks are being terminated; a new attempt follows
    stopping    a stop was requested; the ranks agree on a step, save and exit
    finished    the script ran to its end (terminal, exit code 0)
    stopped     the run was stopped on request (terminal, exit code 75 if something can be resumed from)
    failed      the run was given up (terminal, exit code 93 or 2)

`Lifecycle.fire` is the only way to change the state. It looks up the pair (state, event) in the table,
changes the state and calls one listener; a pair that is not in the table raises and changes nothing. Does no
I/O. Called by the supervisor only. Terminal states end this supervisor; the same command may start another
one.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from grpo_run.runtime.errors import IllegalTransition
from grpo_run.watchdog.text import TextEnum


class RunState(TextEnum):
    """State of a run. The values appear in status, metrics and the journal."""

    starting = "starting"
    running = "running"
    suspect = "suspect"
    collecting = "collecting"
    recovering = "recovering"
    stopping = "stopping"
    finished = "finished"
    stopped = "stopped"
    failed = "failed"


class RunEvent(str, Enum):
    """What can happen to a run."""

    step_committed = "step_committed"
    trains_without_trainer = "trains_without_trainer"
    suspicion = "suspicion"
    cleared = "cleared"
    fault = "fault"
    evidence_written = "evidence_written"
    membership_changed = "membership_changed"
    restarted = "restarted"
    stop_requested = "stop_requested"
    completed = "completed"
    gave_up = "gave_up"
    stopped = "stopped"


TERMINAL = frozenset({RunState.finished, RunState.stopped, RunState.failed})
LIVE = frozenset(RunState) - TERMINAL

_WHILE_RANKS_RUN: dict[RunEvent, RunState] = {
    RunEvent.step_committed: RunState.running,
    RunEvent.trains_without_trainer: RunState.running,
    RunEvent.fault: RunState.collecting,
    RunEvent.membership_changed: RunState.recovering,
    RunEvent.stop_requested: RunState.stopping,
    RunEvent.completed: RunState.finished,
    RunEvent.stopped: RunState.stopped,
}
"""`stopped` is legal without `stop_requested`: the request may have been made on another node."""

_TABLE: dict[RunState, dict[RunEvent, RunState]] = {
    RunState.starting: {**_WHILE_RANKS_RUN, RunEvent.suspicion: RunState.suspect},
    RunState.running: {**_WHILE_RANKS_RUN, RunEvent.suspicion: RunState.suspect},
    RunState.suspect: {**_WHILE_RANKS_RUN, RunEvent.cleared: RunState.running},
    RunState.collecting: {RunEvent.evidence_written: RunState.recovering},
    RunState.recovering: {
        RunEvent.restarted: RunState.starting,
        RunEvent.stop_requested: RunState.stopping,
        RunEvent.stopped: RunState.stopped,
    },
    RunState.stopping: {
        RunEvent.step_committed: RunState.stopping,
        RunEvent.trains_without_trainer: RunState.stopping,
        RunEvent.fault: RunState.collecting,
        RunEvent.membership_changed: RunState.stopping,
        RunEvent.restarted: RunState.stopping,
        RunEvent.completed: RunState.finished,
        RunEvent.stopped: RunState.stopped,
    },
}
TRANSITIONS: dict[tuple[RunState, RunEvent], RunState] = {
    (state, event): new
    for state, events in _TABLE.items()
    for event, new in (*events.items(), (RunEvent.gave_up, RunState.failed))
}
"""A run can be given up in every live state."""


class Lifecycle:
    """The present state of a run.

    Args:
        on_change: called with (old state, event, new state) after each change; not called when the state
            stays.
    """

    def __init__(self, on_change: Callable[[RunState, RunEvent, RunState], None]) -> None:
        self._state = RunState.starting
        self._on_change = on_change

    @property
    def state(self) -> RunState:
        """The present state."""
        return self._state

    def fire(self, event: RunEvent) -> RunState:
        """Apply one event and return the new state.

        Raises:
            IllegalTransition: the pair (state, event) is not in the table; the state is unchanged.
        """
        old = self._state
        new = TRANSITIONS.get((old, event))
        if new is None:
            raise IllegalTransition(f"event {event.value!r} in state {old.value!r}")
        self._state = new
        if new is not old:
            self._on_change(old, event, new)
        return new


def diagram() -> str:
    """Return the table as a Mermaid state diagram, for `docs/reference/lifecycle.md`."""
    lines = ["stateDiagram-v2", "    [*] --> starting"]
    lines += [
        f"    {old} --> {new}: {event.value}" for (old, event), new in TRANSITIONS.items() if old is not new
    ]
    lines += [f"    {state} --> [*]" for state in sorted(TERMINAL)]
    return "\n".join(lines) + "\n"
