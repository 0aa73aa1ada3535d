"""The files of all ranks as one line for each prompt of the data order. Pure.

How often a rollout was trained follows from the micro-steps of the steps that count: one that no step has
used although later ones were is lost, and so is a prompt that another one has replaced when its step was done
again. Called by `report.py` and `command.py`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from grpo_run.runtime.features.ledger._lines import AGAIN, DIGEST_CHARACTERS
from grpo_run.runtime.features.ledger._replay import At, Drawn, Replay, Used
from grpo_run.runtime.upstream import async_grpo_names
from grpo_run.watchdog.text import TextEnum

QUARANTINED = "quarantined"
"""The reason of rows whose prompt was replaced."""


class PromptState(TextEnum):
    """What became of a prompt."""

    trained = "trained"
    again = "trained_again"
    """It was generated or trained again after a fault; the newest attempt counts."""
    masked = "masked"
    """No sample of its group is in the loss."""
    quarantined = "quarantined"
    stale = "stale"
    """AsyncGRPO has dropped all its samples, as of a policy that was too old."""
    open = "open"
    """Drawn, and not trained to the end yet."""
    twice = "twice"
    """It counts more than once."""
    lost = "lost"


@dataclass(kw_only=True)
class PromptLine:
    """One prompt.

    Attributes:
        position: in the data order of the epoch, from 0.
        prompt: a short digest; empty if no rank has written it.
        attempt, step: of the training that counts; None if nothing does.
        lengths: tokens of the completions that count, or were drawn last.
        masked: how many of them have left the loss, by reason.
        repeated: tokens of the completions of earlier draws.
        stale: how many completions were thrown away because their policy was not the one that was meant.
    """

    train_call: int
    epoch: int
    position: int
    prompt: str = ""
    state: PromptState = PromptState.open
    attempt: int | None = None
    step: int | None = None
    lengths: list[int] = field(default_factory=list)
    masked: Counter[str] = field(default_factory=Counter)
    repeated: list[int] = field(default_factory=list)
    stale: int = 0


@dataclass
class _Uses:
    """How often a rollout was trained, from the steps that count."""

    often: Fraction = Fraction(0)
    attempt: int | None = None
    step: int | None = None


def join(replays: Sequence[Replay], committed: Mapping[int, int]) -> list[PromptLine]:
    """Return the prompts of a run, by call, epoch and position.

    Args:
        replays: of each rank's file, in the order of the ranks.
        committed: by call, the last step that the journal has as committed.
    """
    if not replays:
        return []
    first = replays[0]
    last = {
        call: max(committed.get(call, 0), first.resumed.get(call, 0)) for call in {*committed, *first.resumed}
    }
    uses = _uses(first.steps, last)
    again = {
        (at[0], number)
        for at, used in first.void_steps
        if at[1] <= last.get(at[0], 0)
        for number in _numbers(used)
    }
    lines: list[PromptLine] = []
    for call in sorted({at[0] for replay in replays for at in (*replay.rollouts, *replay.steps)}):
        lines += _call_lines(replays, call, uses, again)
    for call in sorted(first.streams):
        lines += _async_lines(first, call, last.get(call, 0))
    return lines


def _numbers(used: Used) -> range:
    """The rollouts of which a step has used something."""
    return range(used.begin // used.per_rollout, -(-used.end // used.per_rollout))


def _uses(steps: Mapping[At, Used], last: Mapping[int, int]) -> dict[At, _Uses]:
    found: dict[At, _Uses] = defaultdict(_Uses)
    for (call, step), used in sorted(steps.items()):
        if step > last.get(call, 0):
            continue
        for number in _numbers(used):
            size = used.per_rollout
            part = min(used.end, (number + 1) * size) - max(used.begin, number * size)
            one = found[call, number]
            one.often += Fraction(part, size)
            one.attempt, one.step = used.attempt, step
    return found


def _call_lines(
    replays: Sequence[Replay], call: int, uses: Mapping[At, _Uses], again: set[At]
) -> Iterator[PromptLine]:
    counted: dict[int, list[Drawn]] = defaultdict(list)
    void: dict[int, list[Drawn]] = defaultdict(list)
    for replay in replays:
        for drawn in (one for one in replay.rollouts.values() if one.call == call):
            counted[drawn.number].append(drawn)
        for drawn in (one for one in replay.void_rollouts if one.call == call):
            void[drawn.number].append(drawn)
    trained = [number for of, number in uses if of == call]
    known = [*counted, *void, *trained]
    furthest = max(trained, default=-1)
    lines: list[PromptLine] = []
    gone: list[PromptLine] = []
    epoch, position, groups = 0, 0, 1
    for number in range(min(known), max(known) + 1) if known else ():
        use = uses.get((call, number), _Uses())
        known_draws = counted[number] or void[number]
        newest = max((one.attempt for one in known_draws), default=0)
        draws = list({one.first: one for one in known_draws if one.attempt == newest}.values())
        # of a rank that has not come that far, or does not take part any more, an older draw is left
        earlier = [one for one in (*counted[number], *void[number]) if one not in draws]
        groups = draws[0].groups if draws else groups
        if draws and draws[0].epoch != epoch:
            epoch, position = draws[0].epoch, 0
        group_lines = [
            PromptLine(
                train_call=call, epoch=epoch, position=position + group, attempt=use.attempt, step=use.step
            )
            for group in range(groups)
        ]
        _fill(group_lines, draws, earlier)
        for line in group_lines:
            repeated = (call, number) in again or any(one.attempt != draws[0].attempt for one in earlier)
            line.state = _state(use.often, repeated, number < furthest, line)
        gone += _replaced(group_lines, earlier)
        lines += group_lines
        position += groups
    present = {(one.epoch, one.prompt) for one in lines}
    yield from lines
    yield from (one for one in gone if (one.epoch, one.prompt) not in present)


def _fill(lines: Sequence[PromptLine], draws: Iterable[Drawn], earlier: Iterable[Drawn]) -> None:
    """Add what ranks have drawn to the lines of the groups of a rollout."""
    for drawn in draws:
        for group, prompt in _prompts(drawn):
            lines[group].prompt = prompt
        for row, length in enumerate(drawn.lengths):
            line = lines[(drawn.first + row) // drawn.generations]
            line.lengths.append(length)
            if row in drawn.masked:
                line.masked[drawn.masked[row]] += 1
    attempts = {drawn.attempt for drawn in draws}
    for drawn in earlier:
        for row, length in enumerate(drawn.lengths):
            group = (drawn.first + row) // drawn.generations
            if group < len(lines):
                lines[group].repeated.append(length)
                lines[group].stale += drawn.attempt in attempts


def _prompts(drawn: Drawn) -> Iterator[tuple[int, str]]:
    """The groups that begin among a rank's samples, with their prompts."""
    group = -(-drawn.first // drawn.generations)
    for at in range(0, len(drawn.prompts), DIGEST_CHARACTERS):
        yield group, drawn.prompts[at : at + DIGEST_CHARACTERS]
        group += 1


def _state(often: Fraction, repeated: bool, passed: bool, line: PromptLine) -> PromptState:
    if often > 1:
        return PromptState.twice
    if often < 1:
        return PromptState.lost if passed else PromptState.open
    if line.lengths and sum(line.masked.values()) == len(line.lengths):
        replaced = QUARANTINED in line.masked
        return PromptState.quarantined if replaced else PromptState.masked
    return PromptState.again if repeated else PromptState.trained


def _replaced(lines: Sequence[PromptLine], earlier: Iterable[Drawn]) -> Iterator[PromptLine]:
    """Prompts that were drawn before in the place of others."""
    for drawn in earlier:
        for group, prompt in _prompts(drawn):
            line = lines[group] if group < len(lines) else lines[-1]
            if line.prompt and line.prompt != prompt:
                yield PromptLine(
                    train_call=line.train_call, epoch=drawn.epoch, position=line.position, prompt=prompt,
                    state=PromptState.lost,
                )  # fmt: skip


def _async_lines(replay: Replay, call: int, last: int) -> Iterator[PromptLine]:
    """The prompts of a call of AsyncGRPO, of which rank 0 alone writes.

    A prompt that a later stream leaves out was done, so what counts must say when.
    """
    streams, attempts = replay.streams[call], defaultdict[int, set[int]](set)
    (_, first, size, earlier, _), (_, newest, _, done, _) = streams[0], streams[-1]
    left_out = {*range(first, newest), *done} - earlier
    counted = [(at[1], part) for at in sorted(replay.parts) for part in replay.parts[at] if at[0] == call]
    void = [(0, part) for at, parts in replay.void_parts if at[0] == call for part in parts]
    furthest = max([*left_out, *(part.position for _, part in counted + void)], default=first - 1)
    places = {at: divmod(at, size or at + 1) for at in range(first, furthest + 1)}
    lines = {at: PromptLine(train_call=call, epoch=one[0], position=one[1]) for at, one in places.items()}
    for step, part in [one for one in counted if one[0] <= last] + void:
        line = lines[part.position]
        line.prompt = part.prompt
        if step and not part.reason:
            line.lengths += part.lengths
            line.attempt, line.step = part.attempt, step
            attempts[part.position].add(part.attempt)
            continue
        line.repeated += part.lengths
        if step and part.reason == async_grpo_names.STALE:
            line.stale += len(part.lengths)
        elif step and part.reason != AGAIN:
            line.masked[part.reason] += len(part.lengths)
    again = {part.position for _, part in void}
    for position, line in lines.items():
        drawn = attempts[position]
        anew = {attempt for attempt, *_, partial in streams if position not in partial}
        if drawn and anew & (drawn - {min(drawn)}):
            line.state = PromptState.twice
        elif drawn:
            line.state = PromptState.again if len(drawn) > 1 or position in again else PromptState.trained
        elif line.masked or line.stale:
            line.state = PromptState.masked if line.masked else PromptState.stale
        elif position in left_out:
            line.state = PromptState.lost
    yield from lines.values()
