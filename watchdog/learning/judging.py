"""Ask every guard about the last step. Called in the ranks, by `grpo_run.trainers.learning`. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from grpo_run.watchdog.learning import capped, divergence, entropy, nonfinite, reward_collapse, zero_variance
from grpo_run.watchdog.learning.alarm import Alarm
from grpo_run.watchdog.learning.observations import NOT_FINITE, History, Series
from grpo_run.watchdog.learning.rules import Guard, Response, Rules

_FINDERS: Mapping[Guard, tuple[str, Callable[[Series, float | None], Alarm | None]]] = {
    Guard.zero_variance: ("zero_variance", zero_variance.find),
    Guard.kl: ("kl", divergence.find),
    Guard.entropy: ("entropy", entropy.find),
    Guard.reward: ("reward", reward_collapse.find),
    Guard.capped: ("capped", capped.find),
}


def judge(history: History, step: int, rules: Rules) -> list[Alarm]:
    """Return the alarms of a step that has just been added to the history, the gravest first.

    A guard that has tripped without ending the attempt begins anew: its series is emptied.

    Args:
        step: the optimizer step.
        rules: guards that are off are not asked.
    """
    alarms = []
    if rules.response(Guard.nonfinite) is not Response.off:
        alarm = nonfinite.find(history.series(NOT_FINITE), step)
        if alarm is not None:
            alarms.append(alarm)
    for guard, (name, find) in _FINDERS.items():
        series = history.series(name)
        if rules.response(guard) is Response.off or not series or series[-1].step != step:
            continue
        alarm = find(series, rules.limits.get(guard))
        if alarm is not None:
            alarms.append(alarm)
            history.forget(name)
    return alarms
