"""What differs between a run and its replay, in the order in which a step computes, and what a replay with
other samples or rewards gives beside what the run has recorded.

Called by `grpo-run replay`. Reads the records of steps and the journals of both; a checkpoint's digests are
passed in.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean

import msgspec

from grpo_run.runtime.history import step_records
from grpo_run.runtime.history.events import StepLogged
from grpo_run.runtime.history.reader import read_journal
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.history.step_records import Sample, StepRecord
from grpo_run.watchdog.rank_metrics import LOGGED_FIELDS
from grpo_run.watchdog.text import counted

ROLLOUT, REWARDS, SCORES, LOSS, GRADIENT, TENSORS, LOGGED, SAVED = range(8)
"""Places of a step, over all ranks."""
MOST_GROUPS = 4
"""Of which samples are shown one by one."""


class Difference(msgspec.Struct, frozen=True):
    """Something that differs, and both values.

    Attributes:
        place: in the order in which a step computes.
    """

    name: str
    recorded: str
    replayed: str
    place: int = ROLLOUT


def differences(
    recorded: StepRecord, replayed: StepRecord, rollout: Iterable[Sample] = ()
) -> Iterator[Difference]:
    """Yield what differs, in the order of the places.

    What only one of the records has is not compared, except a number of samples.

    Args:
        rollout: samples of the step in which those of the forward passes were generated.
    """
    if not (recorded.starts or replayed.starts):
        pairs = list(zip(recorded.samples, replayed.samples, strict=False))
        for ours, theirs in pairs:
            for part in ("prompt", "completion"):
                name = f"{part} of sample {ours.number}"
                yield from _text(name, getattr(ours, part), getattr(theirs, part), ROLLOUT)
        lengths = (len(recorded.samples), len(replayed.samples))
        yield from _text("number of samples", *lengths, ROLLOUT, form="{}")
        for ours, theirs in pairs:
            for name, value in ours.rewards.items():
                of = f"reward {name} of sample {ours.number}"
                yield from _number(of, value, theirs.rewards.get(name), REWARDS)
            of = f"advantage of sample {ours.number}"
            yield from _number(of, ours.advantage, theirs.advantage, REWARDS)
        numbers = {one.tokens: one.number for one in rollout}
        for place, (before, after) in enumerate(zip(recorded.scored, replayed.scored, strict=False)):
            if before.digest != after.digest:
                number = numbers.get(before.tokens)
                of = f"completion {place} of the batch" if number is None else f"sample {number}"
                sums = [f"{_value(one.total)} in all (digest {one.digest})" for one in (before, after)]
                yield Difference(f"log-probabilities of {of}", sums[0], sums[1], SCORES)
        yield from _number("loss", recorded.loss, replayed.loss, LOSS)
        yield from _number("gradient norm", recorded.grad_norm, replayed.grad_norm, GRADIENT)
    tensors = replayed.tensors()
    for name, digest in recorded.tensors().items():
        yield from _text(f"tensor {name}", digest, tensors.get(name, digest), TENSORS)


def _text(
    name: str, recorded: object, replayed: object, place: int, form: str = "digest {}"
) -> Iterator[Difference]:
    if recorded != replayed:
        yield Difference(name, form.format(recorded), form.format(replayed), place)


def _number(name: str, recorded: str | None, replayed: str | None, place: int) -> Iterator[Difference]:
    if recorded is not None and replayed is not None and recorded != replayed:
        yield Difference(name, _value(recorded), _value(replayed), place)


def _value(number: str) -> str:
    return repr(float.fromhex(number))


@dataclass(frozen=True, kw_only=True)
class CallRecords:
    """What a run has of the steps of one call.

    Attributes:
        ranks: records by rank, and by step.
        logged: by step.
    """

    ranks: Mapping[int, Mapping[int, StepRecord]]
    logged: Mapping[int, StepLogged]

    @classmethod
    def read(cls, run: RunDirectory, call: int) -> CallRecords:
        """Read a run."""
        ranks = {
            rank: {step: one for (of, step), one in step_records.read(run.steps, rank).items() if of == call}
            for rank in step_records.ranks(run.steps)
        }
        logged = {
            one.step: one
            for one in read_journal(run.journal)
            if isinstance(one, StepLogged) and one.train_call == call and one.step is not None
        }
        return cls(ranks=ranks, logged=logged)

    def of_step(self, step: int) -> list[StepRecord]:
        """Return what ranks have computed in a step."""
        found = [steps[step] for steps in self.ranks.values() if step in steps]
        return [one for one in found if not one.starts]

    def rollout_step(self, step: int) -> int | None:
        """Return the last step until this one in which samples were generated; None if none is known."""
        known = [at for steps in self.ranks.values() for at, one in steps.items() if one.samples]
        return max((at for at in known if at <= step), default=None)

    def samples(self, step: int) -> dict[int, Sample]:
        """Return the samples that were generated in a step, by their numbers."""
        return {one.number: one for record in self.of_step(step) for one in record.samples}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What was compared.

    Attributes:
        said: of what, in words.
        last: step of which something was.
        step: of the first difference.
    """

    said: list[str]
    last: int
    step: int = 0
    first: Difference | None = None


def compare(
    recorded: CallRecords,
    replayed: CallRecords,
    steps: range,
    *,
    rank: int | None = None,
    saved: Mapping[str, str] | None = None,
    changed_from: int | None = None,
) -> Comparison:
    """Compare the steps of a replay.

    Args:
        steps: from the one that was loaded.
        rank: to compare only; None for all.
        saved: digests of the run's checkpoint of the last step by tensor.
        changed_from: the step from which on the replay has other rewards or samples in the loss: of it only
            the rollout is compared, and nothing of later ones.
    """
    if changed_from is not None:
        steps, saved = range(steps.start, min(steps.stop, changed_from + 1)), None
    found, said, both = list[tuple[int, int, int, Difference]](), list[str](), set[int]()
    tensors = samples = 0
    ranks = [one for one in replayed.ranks if rank in (None, one)]
    for one in ranks:
        before, after = recorded.ranks.get(one, {}), replayed.ranks[one]
        for step in steps:
            if step not in before or step not in after:
                continue
            both.add(step)
            tensors = max(tensors, len(before[step].tensors()))
            samples += len(before[step].samples) if step > steps.start else 0
            rollout = before.get(recorded.rollout_step(step) or 0)
            of = rollout.samples if rollout is not None else ()
            first = next(differences(before[step], after[step], of), None)
            if first is not None:
                named = msgspec.structs.replace(first, name=f"{first.name} on rank {one}")
                found.append((step, first.place, one, named))
    if both:
        said.append(
            f"loss, gradient norm, {counted(samples, 'sample')} with rewards and log-probabilities, and"
            f" {counted(tensors, 'tensor')} after {counted(len(both - {steps.start}), 'step')} on"
            f" {counted(len(ranks), 'rank')}"
        )
    if rank in (None, 0):
        logged = [step for step in steps[1:] if step in recorded.logged and step in replayed.logged]
        for step in logged:
            for name in (*LOGGED_FIELDS, "reward_functions"):
                ours, theirs = (repr(getattr(one.logged[step], name)) for one in (recorded, replayed))
                unequal = _text(f"logged {name}", ours, theirs, LOGGED, "{}")
                found += [(step, LOGGED, 0, one) for one in unequal]
        if logged:
            said.append(f"what was logged of {counted(len(logged), 'step')}")
        last = replayed.ranks.get(0, {}).get(steps[-1])
        held = last.tensors() if last is not None else {}
        known = [name for name in saved or () if name in held]
        for name in known:
            of_file = _text(f"tensor {name} of the checkpoint", (saved or {})[name], held[name], SAVED)
            found += [(steps[-1], SAVED, 0, one) for one in of_file]
        if known:
            logged.append(steps[-1])
            said.append(f"{counted(len(known), 'tensor')} of the checkpoint of step {steps[-1]}")
        both.update(logged)
    found = [one for one in found if one[0] != changed_from or one[1] == ROLLOUT]
    step, *_, first = min(found, key=lambda one: one[:3], default=(0, 0, 0, None))
    return Comparison(said=said, last=max(both, default=steps.start), step=step, first=first)


UNKNOWN, LEFT_OUT = "-", "left out"
Row = tuple[str, float | str, float | str]
"""What, its recorded value, and its replayed one."""


def changed_rows(
    recorded: CallRecords, replayed: CallRecords, step: int, rollout: int, dropped: Collection[int]
) -> Iterator[Row]:
    """Yield what a replay with other rewards or samples gives beside what the run has recorded.

    Args:
        rollout: the step in which the samples of the step were generated.
        dropped: numbers of samples that were left out of the loss.
    """
    sides = (recorded, replayed)
    for name, field in (("loss", "loss"), ("gradient norm", "grad_norm")):
        means = [_mean(getattr(one, field) for one in side.of_step(step)) for side in sides]
        if means[0] == UNKNOWN and all(step in side.logged for side in sides):
            known = [getattr(side.logged[step], field) for side in sides]
            means = [UNKNOWN if one is None else one for one in known]
        yield name, means[0], means[1]
    ours, theirs = (side.samples(rollout) for side in sides)
    functions = [name for one in list(theirs.values())[:1] for name in one.rewards]
    for name in functions:
        left = [one for number, one in theirs.items() if number not in dropped]
        means = [
            _mean((one.rewards.get(name) for one in samples), finite=True)
            for samples in (ours.values(), left)
        ]
        yield f"reward {name}, mean", means[0], means[1]
    size = next((one.generations for one in replayed.of_step(rollout)), 0) or 1
    groups = sorted({
        number // size
        for number, one in theirs.items()
        if number in dropped or (ours[number].rewards != one.rewards if number in ours else not dropped)
    })  # fmt: skip
    for number in (group * size + place for group in groups[:MOST_GROUPS] for place in range(size)):
        pair = [side.get(number) for side in (ours, theirs)]
        for name in functions:
            before, after = (_mean([one.rewards.get(name) if one else None], finite=True) for one in pair)
            yield f"sample {number}, reward {name}", before, after
        before, after = (_mean([one.advantage if one else None]) for one in pair)
        yield f"sample {number}, advantage", before, LEFT_OUT if number in dropped else after


def _mean(numbers: Iterable[str | None], *, finite: bool = False) -> float | str:
    """Return the mean of the known numbers. Rewards that failed or do not apply are not finite."""
    values = [float.fromhex(one) for one in numbers if one is not None]
    values = list(filter(math.isfinite, values)) if finite else values
    return fmean(values) if values else UNKNOWN
