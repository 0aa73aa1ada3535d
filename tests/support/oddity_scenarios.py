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
SHORT_ONLY = {"hold-interpreter": 12, "alarm-in-regex": 12}
"""Waits in which no other thread of the interpreter runs, and the longest pause in seconds."""
LEFT_RUNNING = frozenset({"child-left-running", "helper-left-running", "recompilation"})
"""Waits that do not take the seconds given."""
AT_EXIT = frozenset({
    "sleep", "compute", "child", "http", "condition", "pipe-of-helper", "fifo-of-helper", "file-of-helper",
    "pid-descriptor-of-helper",
})  # fmt: skip
"""Possible after the last line, when Python starts no more threads."""
HANDLES_SIGNALS = re.compile(r"alarm-.*")
"""Possible in the main thread only."""


def names(file: str) -> list[str]:
    """Return the names of the waits or groups in a script of `tests/scripts`."""
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


def possible(wait: str, place: str, seconds: int) -> bool:
    """Whether a wait can be used at a place, for so long."""
    if seconds > SHORT_ONLY.get(wait, seconds):
        return False
    if place in ("exit-handler", "left-thread"):
        return wait in AT_EXIT
    return place != "thread" or HANDLES_SIGNALS.fullmatch(wait) is None


def oddity(wait: str, seconds: int, place: str, *, step: int, rank: int) -> str:
    """Return the script's word for one wait."""
    if place == "save-model":
        rank = 0  # the others do not save
    if place == "save":
        step = 4 if step < 8 else 12
    return f"{wait}:{seconds}@{place}:{step}:{rank}"


def pauses() -> list[Scenario]:
    """Return scenarios with a pause of each length at each place, and with every wait."""
    waits = [wait for wait in names("waits.py") if wait not in LEFT_RUNNING]
    unused = list(waits)
    turn = itertools.cycle(waits)
    found = []

    def pick(place: str, seconds: int) -> str:
        for wait in list(unused):
            if possible(wait, place, seconds):
                unused.remove(wait)
                return wait
        return next(wait for wait in turn if possible(wait, place, seconds))

    for long, short in (LENGTHS[:2], LENGTHS[2:]):
        for number, place in enumerate(PAUSES):
            other = PAUSES[(number + 1) % len(PAUSES)]
            words = (
                oddity(pick(place, long), long, place, step=6, rank=1),
                oddity(pick(other, short), short, other, step=13, rank=0),
            )
            calls = ("--calls", "2") if "between" in (place, other) else ()
            found.append(Scenario(name=f"{place}-{long}-{other}-{short}", oddities=words, arguments=calls))
    for number, wait in enumerate(unused):  # more waits than places
        words = (oddity(wait, 12, ("callback", "reward", "data")[number % 3], step=6, rank=1),)
        found.append(Scenario(name=f"further-12-{wait}", oddities=words))
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
