"""What a test plants in the stand-in server: delays, wrong weights, and one fault at a counted moment.

Given as JSON in `ROLLOUT_SERVER_PLANTS`, or later to the route `/stand_in`. Nothing is planted by default.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, replace
from typing import Any

VARIABLE = "ROLLOUT_SERVER_PLANTS"
FAULT = re.compile(
    r"(kill|stop|hang|fail|restart) (engine|server)"
    r" at (startup|completion|generation|start|update|finish|reset) (\d+)"
)


@dataclass(frozen=True)
class Plants:
    """Behaviour that differs from a healthy server's.

    Attributes:
        startup_seconds: before the server listens.
        first_completion_seconds: of the first completion request, on top of its work.
        completion_seconds: of every completion request.
        sync_seconds: of every `/update_weights`.
        leaves_seconds: how long the server stays after its engine has died, saying so; vLLM looks every
            5 s, or leaves when a request has failed. The exit code is 0, as vLLM's.
        serves: "stale" for the weights of two syncs ago, "base" for those that it began with; versions and
            answers stay those of a healthy server.
        fault: as in "kill engine at update 2". `kill` and `stop` send SIGKILL and SIGSTOP, to the engine or
            to both processes; `hang engine` never answers again, `fail engine` answers with an error, and
            `restart engine` begins anew at once, as a server does that somebody starts again.
            Moments are counted in each process: `startup` is before it listens, `completion` a request for
            one, `start`, `update` (half of the tensors have arrived), `finish` and `reset` the requests of
            a sync in their order.
        mark: file that the fault creates; where it exists, a fault does not happen again.
    """

    startup_seconds: float = 0.0
    first_completion_seconds: float = 0.0
    completion_seconds: float = 0.0
    sync_seconds: float = 0.0
    leaves_seconds: float = 1.0
    serves: str = ""
    fault: str = ""
    mark: str = ""

    def __post_init__(self) -> None:
        if self.serves not in ("", "stale", "base"):
            raise ValueError(f"serves: {self.serves!r}")
        if self.fault and not FAULT.fullmatch(self.fault):
            raise ValueError(f"fault: {self.fault!r}")

    def changed(self, changes: dict[str, Any]) -> Plants:
        """Return these with other values."""
        return replace(self, **changes)

    def due(self, moment: str, count: int) -> tuple[str, str] | None:
        """Return action and target of the fault if it is to happen now, and leave its mark."""
        found = FAULT.fullmatch(self.fault)
        if found is None or (found[3], int(found[4])) != (moment, count):
            return None
        if self.mark:
            try:
                open(self.mark, "x").close()
            except FileExistsError:
                return None
        return found[1], found[2]


def from_environment() -> Plants:
    """Return what the environment plants."""
    return Plants(**json.loads(os.environ.get(VARIABLE, "{}")))
