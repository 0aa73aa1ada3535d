"""Which healthy runs with oddities there are: scenarios that a watchdog might take for a hang.

A scenario is one real run under the defaults: waits at places of a user's code (`tests/scripts/waits.py`),
communication between ranks (`groups.py`), and conditions around the run. `oddities.py` beside it runs them.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from support.runs import SCRIPTS

FREEZES = {"freeze": ("everyone", 60.0), "freeze-supervisor": ("supervisor", 20.0), "blink": ("rank", 5.0)}
"""Conditions that stop processes: which, and for how many seconds."""
LENGTHS = (50, 12, 30, 5)
PAUSES = (
    "startup", "map", "first", "reward", "data", "generate", "callback", "thread", "save", "evaluation",
    "evaluated",
    "save-model", "own-save", "between", "exit-handler", "left-thread",
)  # fmt: skip
"""Places of the pauses; see `tests/scripts/places.py`."""
EVERYWHERE = ("sleep", "child", "condition")
"""Waits that are possible at every place; others are judged by `tests/integration/test_wait_states.py`."""


def names(file: str) -> list[str]:
    """Return the names of the groups in a script of `tests/scripts`."""
    text = (SCRIPTS / file).read_text()
    return [name.replace("_", "-") for name in re.findall(r"@legitimate\ndef _(\w+)\(", text)]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One healthy run.

    Args:
        name: for the table.
        oddities: `--oddity` of the script.
        groups: `--group-oddity` of the script.
        ranks: number of ranks.
        arguments: further ones of the script.
        conditions: of `nice`, `load`, `forward`, `back` and `FREEZES`.
        compare: whether the weights are compared with an undisturbed run's.
        most_incidents: how many are acceptable.
    """

    name: str
    oddities: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    ranks: int = 2
    arguments: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()
    compare: bool = True
    most_incidents: int = 0

    def __str__(self) -> str:
        return self.name

    @property
    def parts(self) -> list[str]:
        """Every oddity in it, in words."""
        return [*self.oddities, *self.groups, *self.arguments, *self.conditions, f"{self.ranks} ranks"]


def oddity(wait: str, seconds: int, place: str, *, step: int, rank: int) -> str:
    """Return the script's word for one wait."""
    if place == "save-model":
        rank = 0  # the others do not save
    if place == "save":
        step = 4 if step < 8 else 12
    return f"{wait}:{seconds}@{place}:{step}:{rank}"


def pauses() -> list[Scenario]:
    """Return scenarios with a pause of each length at each place."""
    waits = itertools.cycle(EVERYWHERE)
    found = []
    for long, short in (LENGTHS[:2], LENGTHS[2:]):
        for place, other in zip(PAUSES, (*PAUSES[1:], PAUSES[0]), strict=True):
            words = (
                oddity(next(waits), long, place, step=6, rank=1),
                oddity(next(waits), short, other, step=13, rank=0),
            )
            calls = ("--calls", "2") if "between" in (place, other) else ()
            found.append(Scenario(name=f"{place}-{long}-{other}-{short}", oddities=words, arguments=calls))
    return found


def others() -> list[Scenario]:
    """Return the scenarios with groups and with conditions."""
    groups = names("groups.py")
    found = [
        Scenario(
            name=f"groups-{ranks}-ranks-{number}",
            groups=tuple(f"{name}:{5 if ranks == 2 else 4}@{step}" for step, name in enumerate(part, 3)),
            ranks=ranks,
        )
        for ranks in (2, 3)
        for number, part in enumerate([groups[:7], groups[7:14], groups[14:]])
    ]
    slowly = ("--step-seconds", "0.2")
    waiting = ("child:12@reward:6:1", "lock:12@callback:9:0")
    loading = '{"dataloader_num_workers": 2}'
    bars = '{"disable_tqdm": false, "logging_steps": 1, "include_num_input_tokens_seen": "all"}'
    return [
        *found,
        Scenario(name="nice-8-ranks", ranks=8, conditions=("nice", "load"), compare=False),
        Scenario(name="nice", oddities=waiting, conditions=("nice", "load")),
        Scenario(name="frozen", arguments=slowly, conditions=("freeze",)),
        Scenario(name="frozen-in-a-pause", oddities=("queue:30@callback:6:1",), conditions=("freeze",)),
        Scenario(name="supervisor-frozen", arguments=slowly, conditions=("freeze-supervisor",)),
        Scenario(name="rank-blinks", arguments=slowly, conditions=("blink",)),
        Scenario(name="one-rank", ranks=1, oddities=("child:50@reward:6:0", "queue:30@callback:9:0")),
        Scenario(
            name="all-wait",
            oddities=("file-of-helper:80@startup:0:0", "file-of-helper:75@startup:0:1"),
            most_incidents=1,
        ),
        Scenario(name="clock-forward", oddities=waiting, arguments=slowly, conditions=("forward",)),
        Scenario(name="clock-back", oddities=waiting, arguments=slowly, conditions=("back",)),
        Scenario(name="interpreter-held", oddities=("hold-interpreter:12@reward:6:1",)),
        Scenario(name="loader-workers", oddities=("sleep:12@data:1:1",), arguments=("--settings", loading)),
        Scenario(
            name="progress-bars", oddities=("condition:12@callback:6:1",), arguments=("--settings", bars)
        ),
        Scenario(
            name="left-running",
            oddities=(
                "child-left-running:20@callback:3:1",
                "threads-left-waiting:5@callback:4:0",
                "helper-left-running:20@callback:5:1",
                "recompilation:0@reward:6:0",
                "raw-fork:5@save:8:1",
                "pipe-of-helper:20@exit-handler:0:1",
            ),
        ),
    ]


def rare(wait: str, seconds: int, place: str) -> Scenario:
    """Return a scenario with a pause that repeats in every attempt and may cost one recovery, never the
    run.
    """
    words = (oddity(wait, seconds, place, step=6, rank=1),)
    return Scenario(name=f"long-{wait}-{place}-{seconds}", oddities=words, most_incidents=1)


LONG = (rare("sleep", 90, "callback"), rare("child", 80, "reward"), rare("condition", 80, "save"))
QUICK = (
    Scenario(
        name="quick-waits",
        oddities=(
            "alarm-in-lock:3@reward:4:1",
            "fifo-of-helper:3@callback:6:0",
            "socket-pair-of-helper:3@data:8:1",
        ),
    ),
    Scenario(
        name="quick-groups",
        groups=("thread-serves-group:2@3", "ring:2@4", "monitored-barrier:2@5", "no-member:2@6"),
        ranks=3,
    ),
)
