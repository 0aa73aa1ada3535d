"""The sums of the ledger: what became of prompts and completions, and how long those are that count.

`read_ledger` reads a run directory, `summary` is pure, `lines` says it in sentences for `grpo-run report` and
`grpo-run ledger`. A fault must not change which lengths are trained: the quantiles of what counts stand
beside those of everything that was drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from grpo_run.runtime.features.ledger._join import PromptLine, PromptState, join
from grpo_run.runtime.features.ledger._lines import FOLDER, ledger_file, read_lines
from grpo_run.runtime.features.ledger._replay import Replay
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.watchdog.text import counted

QUANTILES = (10, 50, 90, 99)
"""In percent."""
WORDS = {
    PromptState.trained: "trained once",
    PromptState.again: "trained after they were repeated for a fault",
    PromptState.masked: "masked",
    PromptState.quarantined: "quarantined",
    PromptState.stale: "discarded as stale",
    PromptState.open: "not trained to the end yet",
    PromptState.twice: "trained twice",
    PromptState.lost: "lost",
}


def read_ledger(run: RunDirectory, history: History) -> tuple[list[PromptLine], list[str]]:
    """Return the prompts of a run, and sentences on what its files lack.

    Raises:
        OSError: a file cannot be read.
    """
    found = sorted(int(file.stem[4:]) for file in (run.path / FOLDER).glob("rank*.jsonl"))
    replays = [Replay.of(read_lines(ledger_file(run.path, rank)), rank) for rank in found]
    if not replays or found[0] != 0:
        return [], ["The ledger of prompts is in the run directory of the host of rank 0."] * bool(replays)
    notes = replays[0].notes
    missing = len(set(range(replays[0].ranks)) - set(found))
    if missing:
        notes.append(f"The files of {counted(missing, 'rank')} are not here: their completions are missing.")
    if damaged := sum(one.damaged for one in replays):
        notes.append(f"{counted(damaged, 'line')} cannot be read.")
    return join(replays, {call.ordinal: call.reached for call in history.calls}), notes


def quantiles(lengths: Sequence[int]) -> dict[str, int]:
    """Return the quantiles of some lengths, and the largest; empty for none."""
    ordered = sorted(lengths)
    if not ordered:
        return {}
    last = len(ordered) - 1
    return {f"p{one}": ordered[round(one / 100 * last)] for one in QUANTILES} | {"max": ordered[-1]}


def summary(prompts: Iterable[PromptLine]) -> dict[str, Any]:
    """Return the sums: prompts by state, completions, masked ones by reason, and lengths of completions that
    count, that were repeated, and of all that were drawn.
    """
    states: Counter[str] = Counter({state.value: 0 for state in PromptState})
    masked: Counter[str] = Counter()
    lengths: dict[str, list[int]] = {"trained": [], "repeated": [], "drawn": []}
    stale = 0
    for one in prompts:
        states[one.state.value] += 1
        masked += one.masked
        stale += one.stale
        lengths["trained"] += one.lengths if one.attempt is not None else []
        lengths["repeated"] += one.repeated
        lengths["drawn"] += one.lengths + one.repeated
    return {
        "prompts": dict(states),
        "completions": {name: len(values) for name, values in lengths.items()} | {"stale": stale},
        "masked": dict(masked),
        "lengths": {name: quantiles(values) for name, values in lengths.items()},
    }


def sentences(sums: dict[str, Any]) -> list[str]:
    """Return the sums as lines."""
    states, completions = sums["prompts"], sums["completions"]
    parts = [
        f"{states[state]:,} {words}"
        for state, words in WORDS.items()
        if states[state] or state is PromptState.lost
    ]
    lines = [f"{counted(sum(states.values()), 'prompt')}: {', '.join(parts)}."]
    if sums["masked"]:
        reasons = ", ".join(f"{reason} {number}" for reason, number in sums["masked"].items())
        lines.append(f"{counted(sum(sums['masked'].values()), 'completion')} left the loss: {reasons}.")
    if completions["stale"]:
        lines.append(f"{counted(completions['stale'], 'completion')} discarded as stale.")
    shown = ("trained", "repeated", "drawn") if completions["repeated"] else ("trained",)
    for name in shown:
        if values := sums["lengths"][name]:
            text = ", ".join(f"{quantile} {length:,}" for quantile, length in values.items())
            lines.append(f"Tokens of the {completions[name]:,} completions {name}: {text}.")
    return lines


def lines(run: RunDirectory, history: History) -> Sequence[str]:
    """Return what the report of a run says; nothing for a run without a ledger."""
    try:
        prompts, notes = read_ledger(run, history)
    except OSError as error:
        return [f"The ledger of prompts cannot be read: {error}."]
    return [*sentences(summary(prompts)), *notes] if prompts else notes
