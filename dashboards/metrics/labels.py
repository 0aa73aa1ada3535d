"""Labels of the metrics and their closed sets of values.

Every label is a closed set, one value per local rank, or a bounded number of names of reward functions, so no content of
a journal or board can add series without limit. Causes and actions are listed here only if the code can produce them; unit tests compare the lists
with the sources. Used by `catalogue.py` and `readings.py`.
"""

from __future__ import annotations

from grpo_run.dashboards.metrics.metric import Label
from grpo_run.runtime.continuity.decision import RESTARTS, Action
from grpo_run.runtime.continuity.rewards import MOST_FUNCTIONS, FailureKind
from grpo_run.runtime.rollouts.exclusions import Reason
from grpo_run.runtime.supervision.lifecycle import RunState
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.learning.rules import Guard
from grpo_run.watchdog.observation import EndReason, Phase, RankState

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

INCIDENT_CAUSES = (
    Cause.exception,
    Cause.signal,
    Cause.startup_failure,
    Cause.collective_mismatch,
    Cause.collective_missing_rank,
    Cause.rank_exited_early,
    Cause.generation_stall,
    Cause.reward_stall,
    Cause.data_stall,
    Cause.checkpoint_stall,
    Cause.interpreter_stuck,
    Cause.gpu_oom,
    Cause.host_oom,
    Cause.shm_full,
    Cause.no_progress,
    Cause.nonfinite,
    Cause.learning_collapse,
    Cause.unknown,
)
"""The causes a verdict can have. A member of `Cause` that no verdict uses yet is not exported."""

DECIDED_ACTIONS = (
    Action.restart,
    Action.restart_from_earlier_checkpoint,
    Action.restart_with_plan_change,
    Action.quarantine_batch,
    Action.stop,
)
"""The actions the supervisor can decide on. A member of `Action` that nothing decides yet is not exported."""

CAUSES = tuple(cause.value for cause in INCIDENT_CAUSES)
RESTART_ACTIONS = tuple(action.value for action in DECIDED_ACTIONS if action in RESTARTS)
ACTIONS = (*(action.value for action in DECIDED_ACTIONS), UNDECIDED)

GUARD = Label(name="guard", values=tuple(guard.value for guard in Guard))
END_REASONS = tuple(reason.value for reason in EndReason)

RANK = Label(name="rank", values=None)
RUN_STATE = Label(name="state", values=RUN_STATES)
RANK_STATE = Label(name="state", values=RANK_STATES)
PHASE = Label(name="phase", values=PHASES)
MEMORY_PHASE = Label(name="phase", values=MEMORY_PHASES)
HOST_MEMORY = Label(name="kind", values=("anonymous", "file", "shared", "pinned", "proportional"))
HELPER = Label(name="helper", values=("data_workers", "other", "grpo_run"))
CAUSE = Label(name="cause", values=CAUSES)
END_REASON = Label(name="reason", values=END_REASONS)
RESTART = Label(name="action", values=RESTART_ACTIONS)
LAST_CAUSE = Label(name="cause", values=CAUSES, exclusive=True)
LAST_ACTION = Label(name="action", values=ACTIONS, exclusive=True)
CULPRIT = Label(name="culprit", values=None, exclusive=True)
AWAITED_RANK = Label(name="rank", values=None, exclusive=True)
AWAITED_PHASE = Label(name="phase", values=PHASES, exclusive=True)
REWARD_FUNCTION = Label(name="function", values=None, most=MOST_FUNCTIONS + 1)
REWARD_FAILURE = Label(name="kind", values=tuple(kind.value for kind in FailureKind))
EXCLUSION = Label(name="reason", values=tuple(reason.value for reason in Reason))
VERSION = Label(name="version", values=None, exclusive=True)
