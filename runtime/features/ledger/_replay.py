"""What counts of one rank's ledger: a step that was done again is void, and so is what was generated for it.

A call that goes on after step k takes back all steps of it above k, and the rollouts that were generated for
them. A rollout that a checkpoint holds keeps its line: it was generated for a step up to k. Used by
`_join.py`. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from grpo_run.runtime.features.ledger._lines import DIGEST_CHARACTERS, Part, unpack

Stream = tuple[int, int, int, set[int], set[int]]
"""Where an attempt draws prompts of AsyncGRPO: attempt, and what the line `Q` has."""
At = tuple[int, int]
"""The number of a call, and of a rollout or step in it."""


@dataclass(kw_only=True, eq=False)
class Drawn:
    """What a rank has generated of one rollout.

    Attributes:
        number: of the rollout.
        step: the optimizer step for which it was generated.
        groups: of the rollout of all ranks.
        first: number of the rank's first sample in it.
        prompts: digests of the groups that begin among the samples, concatenated.
        masked: why samples have left the loss, by number of the row in this rank.
    """

    call: int
    attempt: int
    number: int
    epoch: int
    step: int
    generations: int
    groups: int
    first: int
    prompts: str
    lengths: list[int]
    masked: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Used:
    """The micro-steps that an optimizer step has used, and how many a rollout serves."""

    attempt: int
    begin: int
    end: int
    per_rollout: int


@dataclass(kw_only=True)
class Replay:
    """One file. `apply` takes its lines in their order.

    Attributes:
        rollouts, steps: what counts.
        void_rollouts, void_steps: what was done again, in order.
        parts, void_parts: the same for the rows of steps of AsyncGRPO.
        streams: of each call of AsyncGRPO, by attempt.
        resumed: the step after which each call has gone on last.
        notes: says of which steps the lines are elsewhere.
        ranks: of the newest attempt.
        damaged: lines that could not be read.
    """

    rollouts: dict[At, Drawn] = field(default_factory=dict)
    steps: dict[At, Used] = field(default_factory=dict)
    void_rollouts: list[Drawn] = field(default_factory=list)
    void_steps: list[tuple[At, Used]] = field(default_factory=list)
    parts: dict[At, list[Part]] = field(default_factory=dict)
    void_parts: list[tuple[At, list[Part]]] = field(default_factory=list)
    streams: dict[int, list[Stream]] = field(default_factory=dict)
    resumed: dict[int, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    ranks: int = 0
    damaged: int = 0
    _call: int = 0
    _attempt: int = 0
    _generations: int = 1
    _micro_steps: int = 1

    @classmethod
    def of(cls, lines: Iterable[list[Any]], rank: int) -> Replay:
        """Replay the lines of a rank's file; those of another shape are counted."""
        replay = cls()
        for line in lines:
            try:
                replay.apply(line, rank)
            except (ValueError, TypeError, LookupError, AttributeError):
                replay.damaged += 1
        return replay

    def apply(self, line: list[Any], rank: int) -> None:
        """Take one line.

        Raises:
            ValueError, TypeError, LookupError, AttributeError: it has another shape.
        """
        match line:
            case ["B", call, attempt, step, ranks, generations, micro_steps]:
                self._call, self._attempt, self.ranks = int(call), int(attempt), int(ranks)
                self._generations, self._micro_steps = int(generations), int(micro_steps)
                self._go_on(self._call, int(step))
            case ["R", number, epoch, step, prompts, packed]:
                lengths = unpack(packed)
                drawn = Drawn(
                    call=self._call, attempt=self._attempt, number=int(number), epoch=int(epoch),
                    step=int(step), generations=self._generations,
                    groups=self.ranks * len(lengths) // self._generations, first=rank * len(lengths),
                    prompts=str(prompts), lengths=lengths,
                )  # fmt: skip
                if (before := self.rollouts.get((self._call, drawn.number))) is not None:
                    self.void_rollouts.append(before)
                self.rollouts[self._call, drawn.number] = drawn
            case ["M", number, reasons]:
                masked = {row: str(reason) for reason, rows in reasons.items() for row in rows}
                self.rollouts[self._call, int(number)].masked = masked
            case ["S", step, begin, end]:
                self.steps[self._call, int(step)] = Used(
                    attempt=self._attempt, begin=int(begin), end=int(end), per_rollout=self._micro_steps
                )
            case ["A", step, reason, *texts]:
                for text in texts:
                    position, *lengths = unpack(text[DIGEST_CHARACTERS:])
                    part = Part(position, text[:DIGEST_CHARACTERS], lengths, str(reason), self._attempt)
                    self.parts.setdefault((self._call, int(step)), []).append(part)
            case ["Q", first, size, done, partial]:
                stream = self._attempt, int(first), int(size), set(done), set(partial)
                self.streams.setdefault(self._call, []).append(stream)
            case _:
                raise ValueError("not a line of a ledger")

    def _go_on(self, call: int, step: int) -> None:
        here = max((at[1] for at in (*self.steps, *self.parts) if at[0] == call), default=0)
        if step > here:
            missing = f"Steps {here + 1} to {step} of call {call} are not in the file of rank 0"
            self.notes.append(f"{missing}: what they have trained is left out, or counts as lost.")
        self.resumed[call] = step
        self.void_steps += _void(self.steps, call, step)
        self.void_parts += _void(self.parts, call, step)
        for at, drawn in list(self.rollouts.items()):
            if drawn.call == call and drawn.step > step:
                self.void_rollouts.append(self.rollouts.pop(at))


def _void(lines: dict[At, Any], call: int, step: int) -> list[tuple[At, Any]]:
    return [(at, lines.pop(at)) for at in list(lines) if at[0] == call and at[1] > step]
