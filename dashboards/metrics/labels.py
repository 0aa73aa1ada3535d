"""The closed sets of values that labels of the metric catalogue have.

Causes and actions are listed only if the code can produce them; unit tests compare the lists with the
sources. Used by every module of this folder. Defines no metric (`catalogue.py`) and performs no I/O.
"""

from __future__ import annotations

from grpo_run.runtime.features import shown
from grpo_run.runtime.history.lifecycle import RunState
from grpo_run.runtime.history.recovery import Action
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.observation import Phase, RankState

UNKNOWN = "unknown"
UNDECIDED = "undecided"

RUN_STATES = (*(state.value for state in RunState), UNKNOWN)
PHASES = tuple(phase.name for phase in Phase)
MEMORY_PHASES = tuple(
    phase.name
    for phase in (
        Phase.startup,
        Phase.generate,
        Phase.score,
        Phase.forward_backward,
        Phase.optimizer,
        Phase.checkpoint,
        Phase.eval,
    )
)
"""The phases in which a rank allocates much. The memory of the others is in `grpo-run status --json`."""
RANK_STATES = tuple(state.name for state in RankState if state is not RankState.absent)

NO_VERDICT = (Cause.disk_full, Cause.checkpoint_corrupt, Cause.preempted, Cause.node_lost)
"""The causes that no verdict has yet; they are not exported."""
INCIDENT_CAUSES = tuple(cause for cause in Cause if cause not in NO_VERDICT)

DECIDED_ACTIONS = (Action.restart, Action.restart_from_earlier_checkpoint, *shown("ACTIONS"), Action.stop)
"""The actions the supervisor can decide on, with those of features."""

CAUSES = tuple(cause.value for cause in INCIDENT_CAUSES)
ACTION_NAMES = tuple(map(str, DECIDED_ACTIONS))
RESTART_ACTIONS = tuple(action for action in ACTION_NAMES if action != Action.stop)
ACTIONS = (*ACTION_NAMES, UNDECIDED)

OUTCOMES = ("recovered", "gave_up")
MOST_GROUPS = 8
"""Process groups with a name of their own; further ones are one."""
