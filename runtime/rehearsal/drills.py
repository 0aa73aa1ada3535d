"""The drills of a rehearsal: what is done to a run, and what is expected of it. Pure data.

A drill injects a fault into a rank, lets a call of a tool never return, or acts from outside once a rank is
held in a step: a signal to the supervisor or the rollout server, or a damaged checkpoint before the command
is given again. In which step is said by `runtime/launch/rehearsal.py`.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from grpo_run.runtime.errors import ConfigError

HOLD_SECONDS = 5
"""How long a rank is held in the step in which something is done from outside."""
HANG_FLOOR_SECONDS = 5
"""`--deadline-floor` of the hang drill: the drill would otherwise wait for the usual minimum of a hang."""
TOOL_SECONDS, TOOL_FACTOR = 5.0, 4.0
"""`--tool-timeout` of the tool drill is so long, or so many times as long as the longest call."""


class Outside(str, enum.Enum):
    """What is done to a run from outside."""

    stop = "SIGTERM to grpo-run, then the same command"
    kill = "SIGKILL to grpo-run, then the same command"
    truncate = "SIGTERM, newest checkpoint truncated, restart"
    server = "SIGKILL to the rollout server"


@dataclass(frozen=True, kw_only=True)
class Drill:
    """One drill.

    Attributes:
        name: for `--only`.
        done: what is done, for the table.
        kind: of the injected fault, with its phase if it has one; "" if the drill acts from outside.
        outside: what is done from outside; None for a fault in a rank.
        causes: the verdicts that are right.
        options: of the launch.
        may_change: the recovery may change how the job computes, so other weights are no shortfall.
        small_snapshots: the snapshot directory has no room.
        tool_hangs: a call of a tool never returns.
    """

    name: str
    done: str
    kind: str = ""
    outside: Outside | None = None
    causes: frozenset[str] = frozenset()
    options: tuple[str, ...] = ()
    may_change: bool = False
    small_snapshots: bool = False
    tool_hangs: bool = False

    @property
    def commands(self) -> int:
        """How often the command is given."""
        return 1 if self.outside in (None, Outside.server) else 2

    def words(self, rank: int, step: int, tool_seconds: float) -> list[str]:
        """Return the options of the launch that let the fault happen in a rank and a step.

        Args:
            tool_seconds: the longest call of a tool without a fault.
        """
        if self.tool_hangs:
            return ["--tool-timeout", f"{max(TOOL_SECONDS, TOOL_FACTOR * tool_seconds):g}"]
        held = f"slow:phase=forward_backward:seconds={HOLD_SECONDS}"
        name, *phase = (self.kind or held).split(":")
        return [*self.options, "--inject", ":".join([f"{name}@rank{rank}:step{step}", *phase])]


DRILLS = (
    Drill(name="kill", done="SIGKILL to a rank", kind="kill", causes=frozenset({"signal"})),
    Drill(
        name="hang", done="a rank stands still", kind="hang:phase=forward_backward",
        causes=frozenset({"no_progress", "collective_missing_rank", "interpreter_stuck", "generation_stall",
                          "reward_stall"}),
        options=("--deadline-floor", str(HANG_FLOOR_SECONDS)),
    ),
    Drill(name="term", done=Outside.stop.value, outside=Outside.stop),
    Drill(name="server", done=Outside.server.value, outside=Outside.server,
          causes=frozenset({"rollout_server_dead"})),
    Drill(name="tool", done="a call of a tool or environment never returns", tool_hangs=True,
          may_change=True),
    Drill(name="oom", done="memory of a rank runs out", kind="oom:phase=backward",
          causes=frozenset({"gpu_oom"}), may_change=True),
    Drill(name="supervisor", done=Outside.kill.value, outside=Outside.kill),
    Drill(name="checkpoint", done=Outside.truncate.value, outside=Outside.truncate),
    Drill(name="snapshots", done="no room for snapshots, SIGKILL to a rank", kind="kill",
          causes=frozenset({"signal"}), small_snapshots=True),
)  # fmt: skip
"""In the order in which they are run: what matters most comes first."""


def chosen(names: str | None) -> tuple[Drill, ...]:
    """Return the drills of `--only`, or all.

    Raises:
        ConfigError: a name is unknown.
    """
    if names is None:
        return DRILLS
    known = {drill.name: drill for drill in DRILLS}
    words = list(dict.fromkeys(filter(None, names.split(","))))
    unknown = [word for word in words if word not in known]
    if unknown or not words:
        raise ConfigError(
            f"--only {names}: no drill {', '.join(unknown) or 'given'}; drills: {', '.join(known)}"
        )
    return tuple(drill for drill in DRILLS if drill.name in words)


def seconds_of(text: str) -> float:
    """Return the seconds of `--for`: a number with s, m or h; without, seconds.

    Raises:
        ConfigError: it is no duration above 0.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    seconds = float(found[1]) * {"m": 60, "h": 3600}.get(found[2], 1) if found else 0.0
    if not 0 < seconds < 7 * 86400:
        raise ConfigError(f"--for {text}: give a duration such as 90s, 5m or 1h")
    return seconds
