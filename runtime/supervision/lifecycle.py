"""The run's lifecycle: every state, every event and every legal transition, in one table.

    starting    ranks are being started; no step was committed in this attempt yet
    running     steps are being committed
    suspect     something was seen that may be a fault; evidence is not yet asked for
    collecting  a fault is established; evidence is written before anything is killed
    recovering  ranks are down or going down; a new attempt follows
    stopping    a stop was asked for; ranks agree on a step, save and leave
    finished    the script ran to its end (terminal)
    failed      the run was given up, or stopped (terminal for this supervisor; a new one starts over)

Rule: nobody assigns a state. `Lifecycle.fire` looks the pair (state, event) up here, changes the state
and tells one listener; a pair that is not in the table raises and changes nothing. Does no I/O.
The supervisor is the only caller.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from grpo_run.runtime.errors import IllegalTransition


class State(str, Enum):
    """Where the run is. Values are what status, metrics and the journal show."""

    starting = "starting"
    running = "running"
    suspect = "suspect"
    collecting = "collecting"
    recovering = "recovering"
    stopping = "stopping"
    finished = "finished"
    failed = "failed"

    def __str__(self) -> str:
        return self.value


class Event(str, Enum):
    """What can happen to a run."""

    step_committed = "step_committed"
    suspicion = "suspicion"
    cleared = "cleared"
    fault = "fault"
    evidence_written = "evidence_written"
    restarted = "restarted"
    stop_requested = "stop_requested"
    completed = "completed"
    gave_up = "gave_up"
    stopped = "stopped"


TERMINAL = frozenset({State.finished, State.failed})
LIVE = frozenset(State) - TERMINAL

TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.starting, Event.step_committed): State.running,
    (State.starting, Event.suspicion): State.suspect,
    (State.starting, Event.fault): State.collecting,
    (State.starting, Event.stop_requested): State.stopping,
    (State.starting, Event.completed): State.finished,
    (State.running, Event.step_committed): State.running,
    (State.running, Event.suspicion): State.suspect,
    (State.running, Event.fault): State.collecting,
    (State.running, Event.stop_requested): State.stopping,
    (State.running, Event.completed): State.finished,
    (State.suspect, Event.step_committed): State.running,
    (State.suspect, Event.cleared): State.running,
    (State.suspect, Event.fault): State.collecting,
    (State.suspect, Event.stop_requested): State.stopping,
    (State.suspect, Event.completed): State.finished,
    (State.collecting, Event.evidence_written): State.recovering,
    (State.recovering, Event.restarted): State.starting,
    (State.recovering, Event.gave_up): State.failed,
    (State.recovering, Event.stopped): State.failed,
    (State.stopping, Event.step_committed): State.stopping,
    (State.stopping, Event.completed): State.finished,
    (State.stopping, Event.stopped): State.failed,
    (State.stopping, Event.fault): State.collecting,
}


class Lifecycle:
    """The present state and its only way to change.

    Args:
        on_change: called as (old, event, new) after each change of state; not called when it stays.
    """

    def __init__(self, on_change: Callable[[State, Event, State], None] | None = None) -> None:
        self._state = State.starting
        self._on_change = on_change

    @property
    def state(self) -> State:
        """The present state."""
        return self._state

    def fire(self, event: Event) -> State:
        """Apply one event.

        Raises:
            IllegalTransition: the pair is not in the table; the state is unchanged.
        """
        old = self._state
        new = TRANSITIONS.get((old, event))
        if new is None:
            raise IllegalTransition(f"event {event.value!r} in state {old.value!r}")
        self._state = new
        if new is not old and self._on_change is not None:
            self._on_change(old, event, new)
        return new


def diagram() -> str:
    """The table as a Mermaid state diagram, for `docs/lifecycle.md`."""
    lines = ["stateDiagram-v2", "    [*] --> starting"]
    lines += [
        f"    {old} --> {new}: {event.value}" for (old, event), new in TRANSITIONS.items() if old is not new
    ]
    lines += [f"    {state} --> [*]" for state in sorted(TERMINAL)]
    return "\n".join(lines) + "\n"
