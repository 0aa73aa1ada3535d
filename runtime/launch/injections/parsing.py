"""The text of `--inject`: parse it, and report errors in one line.

Called by the command line, and for the configuration that the ranks receive. What an injection may say is checked by
its constructor (`injection.py`). Pure.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.launch.injections.injection import Injection
from grpo_run.runtime.launch.injections.kinds import KINDS, Kind, find_kind
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.out_of_memory.phases import MemoryPhase

GRAMMAR = "KIND@rankR:stepN[:phase=PHASE][:seconds=S]"


def parse_injection(text: str) -> Injection:
    """Parse `KIND@rankR:stepN[:phase=PHASE][:seconds=S]`, or with `[:rows=N]` or `[:tokens=N]` for memory.

    Raises:
        ConfigError: the text is wrong; the message holds it, the reason, and the closest known word.
    """
    kind, at, address = text.partition("@")
    known = find_kind(kind, text)
    words = address.split(":")
    if not at or len(words) < 2:
        raise ConfigError(f"--inject {text}: write {GRAMMAR}, for example {kind}@rank1:step7")
    rank, step = _number(words[0], "rank", text), _number(words[1], "step", text)
    given: dict[str, str] = {}
    for word in words[2:]:
        key, _, value = word.partition("=")
        if key in given:
            raise ConfigError(f"--inject {text}: {key} is given twice")
        if key not in ("phase", "seconds") and not (key in ("rows", "tokens") and known.takes_rows):
            last = ", seconds=S, rows=N nor tokens=N" if known.takes_rows else " nor seconds=S"
            raise ConfigError(f"--inject {text}: {word!r} is neither phase=PHASE{last}")
        given[key] = value
    phase = _phase(given["phase"], known, text) if "phase" in given else None
    seconds = _seconds(given["seconds"], text) if "seconds" in given else None
    rows, tokens = (_count(given[name], name, text) if name in given else 0 for name in ("rows", "tokens"))
    return Injection.of(kind, rank=rank, step=step, phase=phase, seconds=seconds, rows=rows, tokens=tokens)


def parse_all(texts: Iterable[str]) -> tuple[Injection, ...]:
    """Parse the values of all `--inject` options, in order.

    Raises:
        ConfigError: one is wrong or given twice, or two collective ones share a step and a phase.
    """
    found: list[Injection] = []
    for text in texts:
        injection = parse_injection(text)
        if injection in found:
            raise ConfigError(f"--inject {text}: given twice; an injection fires once in a run")
        clash = next((other for other in found if _clash(injection, other)), None)
        if clash is not None:
            raise ConfigError(
                f"--inject {text}: {clash} is a collective at the same step and phase; change the step or phase of one"
            )
        found.append(injection)
    return tuple(found)


def _clash(left: Injection, right: Injection) -> bool:
    return left.place == right.place and KINDS[left.kind].collective and KINDS[right.kind].collective


def _number(word: str, name: str, text: str) -> int:
    found = re.fullmatch(f"{name}([0-9]{{1,10}})", word)
    if found is None:
        raise ConfigError(f"--inject {text}: {word!r} is not {name} and a number; write {GRAMMAR}")
    return int(found[1])


def _phase(name: str, kind: Kind, text: str) -> Phase | MemoryPhase:
    if name in kind.phases:
        return kind.phases[name]
    near = difflib.get_close_matches(name, kind.phases, 1)
    hint = f"did you mean {near[0]}?" if near else f"phases: {', '.join(kind.phases)}"
    raise ConfigError(f"--inject {text}: no such phase {name!r}; {hint}")


def _seconds(value: str, text: str) -> float:
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value) is None:
        raise ConfigError(f"--inject {text}: seconds={value} is not a number of seconds such as 2.5")
    return float(value)


def _count(value: str, name: str, text: str) -> int:
    if re.fullmatch(r"[1-9][0-9]{0,9}", value) is None:
        raise ConfigError(f"--inject {text}: {name}={value} is not a number of {name} such as 2")
    return int(value)
