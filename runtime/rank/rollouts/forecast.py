"""The memory forecast of one rank: measure its passes, predict the next ones, decide with all ranks.

`prepare` is called by `runtime/rank/hooks/train_call.py` when a call begins, before the trainer is hooked.
It says whether the rollouts have a forecast and why their micro-batches cannot be split
(`runtime/memory/facts.py`, and what splitting within a step adds to that). `forecast_splitting.py` reports
rollouts and passes. After each rollout every rank says what it needs, and all ranks split their
micro-batches alike for the steps of this rollout. Measurements and decisions are kept in a file of the
rank, so the next attempt begins with them and repeats the decisions of rollouts that it generates again.

The limit is the memory of the GPU, or a simulated one: the injected fault with `tokens=N` runs out of
memory above so many tokens, so the forecast takes a token for 1 MiB. The prediction itself is
`_forecast_fit.py`.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from grpo_run.runtime.event import Event
from grpo_run.runtime.memory.facts import split_refusals
from grpo_run.runtime.memory.files import (
    MOST_ROLLOUTS,
    ForecastFile,
    ForecastRecord,
    SplitRollout,
    read_forecast,
)
from grpo_run.runtime.rank.memory.device import DeviceMemory
from grpo_run.runtime.rank.memory_plan.facts import collect_facts
from grpo_run.runtime.rank.rollouts._forecast_fit import (
    Agreement,
    ForecastNeed,
    Needed,
    PeakFit,
    Size,
    agree,
    decide,
    rows_of_pieces,
)
from grpo_run.runtime.rank.saving import description
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.upstream import rollout_names, trainer_names
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.text import size_text

SIMULATED_TOKEN_BYTES = 2**20
"""Any size would do: predictions and limit are in the same unit."""


class MicroBatchesSplit(Event, kw_only=True):
    """Micro-batches of some steps are split, because they would not fit."""

    last_step: int
    train_call: int
    pieces: int
    rows: int
    decided_by: int
    predicted_bytes: int
    predicted_split_bytes: int
    limit_bytes: int
    observed_before_bytes: int


class ForecastMemory:
    """The memory of one rank, as its forecasts see it.

    Args:
        device: the rank's; without an initialized one, no limit is known.
        tokens: for so many tokens a simulated memory suffices, which is used instead; 0 for none.
    """

    def __init__(self, device: DeviceMemory, tokens: int = 0) -> None:
        self._device = device
        self._tokens = tokens

    def limit_bytes(self) -> int:
        """Return what the rank may use in all; 0 if that is not known."""
        return self._tokens * SIMULATED_TOKEN_BYTES if self._tokens else self._device.usable_bytes()

    def allocated_bytes(self) -> int:
        """Return what is allocated now."""
        return 0 if self._tokens else self._device.sizes()[0]

    def gradient_bytes(self, model: Any) -> int:
        """Return what the gradients of a model need that are kept between passes."""
        if self._tokens:
            return 0
        return sum(one.numel() * one.element_size() for one in model.parameters() if one.requires_grad)

    def simulated_peak(self, size: Size) -> int | None:
        """Return what a pass needs; None if it is measured."""
        return size[0] * size[1] * SIMULATED_TOKEN_BYTES if self._tokens else None


def memory_of(session: Session) -> ForecastMemory:
    """Return the memory of this rank."""
    limits = [one.tokens for one in session.config.injections if one.tokens and one.rank == session.rank]
    return ForecastMemory(session.device_memory, min(limits, default=0))


FUSED_OPTIMIZERS = ("lomo", "layerwise")
"""Parts of the names of optimizers that take a step in each backward pass."""


def has_rollouts(trainer: Any) -> bool:
    """Whether a trainer generates as GRPO's and RLOO's do."""
    return rollout_names.generates_rollouts(trainer) and hasattr(trainer, trainer_names.GENERATE)


def refusals(trainer: Any, session: Session) -> tuple[str, ...]:
    """Return why micro-batches of this trainer are not split within a step, each as a clause; empty if they
    may be.
    """
    layout = description.layout(trainer)
    reasons = []
    if layout != description.REPLICATED:
        reasons.append(f"the model is sharded ({layout})")
    try:
        facts = collect_facts(trainer, layout=layout, world_size=session.world_size)
    except (AttributeError, TypeError, ValueError) as error:  # pydantic's error is a ValueError
        return (*reasons, f"the trainer cannot be read: {error!r}")
    # sizes that the script sets elsewhere would contradict a plan, but not a split within a step
    update = split_refusals(facts.model_copy(update={"explicit_sizes": ()}))
    return (*reasons, *update, *_of_a_step(trainer))


def _of_a_step(trainer: Any) -> list[str]:
    from transformers import ProcessorMixin

    reasons = []
    if isinstance(getattr(trainer, "processing_class", None), ProcessorMixin):
        reasons.append("the model takes images")
    if getattr(trainer.args, "n_gpu", 1) > 1:
        reasons.append("DataParallel divides the micro-batch")
    if getattr(trainer, rollout_names.LOSS_IS_SCALED, None) is None:
        reasons.append("what the loss is divided by is not known")
    optimizer = str(getattr(trainer.args.optim, "value", trainer.args.optim)).lower()
    if any(part in optimizer for part in FUSED_OPTIMIZERS):
        reasons.append(f"{optimizer} takes a step in each backward pass")
    if getattr(getattr(trainer.accelerator, "ddp_handler", None), "static_graph", False):
        reasons.append("DDP's static_graph fixes the number of passes")
    return reasons


PassKind = Literal["pass", "score"]
KINDS: dict[Phase, PassKind] = {Phase.forward_backward: "pass", Phase.score: "score"}
"""The passes whose peak is that of a phase."""


@dataclass(frozen=True, kw_only=True)
class GeneratedRollout:
    """What is known of a rollout when it has been generated.

    Args:
        number: the micro-step for which it was generated.
        rows: of a micro-batch.
        length: to which the rows of this rank are padded.
        accumulates: an optimizer step has several micro-batches.
        steps: the first and the last optimizer step that use it.
    """

    number: int
    rows: int
    length: int
    accumulates: bool
    steps: tuple[int, int]


def prepare(trainer: Any, session: Session, train_call: int) -> Forecasts | None:
    """Return the forecasts of a call; None if there are none: no rank knows a limit, or the trainer has no
    rollouts. Collective.
    """
    if not session.config.memory_forecast or not has_rollouts(trainer):
        return None
    memory = memory_of(session)
    if not session.votes.maximum(int(memory.limit_bytes() > 0)):
        return None
    reasons = refusals(trainer, session)
    if session.votes.maximum(int(bool(reasons))) and not reasons:
        reasons = ("another rank cannot",)
    return Forecasts(
        session, memory, train_call, reasons=reasons, gradient_bytes=memory.gradient_bytes(trainer.model)
    )


class Forecasts:
    """The forecasts of one call on this rank.

    Args:
        memory: of this rank.
        train_call: the number of the call.
        reasons: why micro-batches are not split, on any rank; empty if they may be.
        gradient_bytes: what gradients need that are kept between passes.
    """

    def __init__(
        self,
        session: Session,
        memory: ForecastMemory,
        train_call: int,
        *,
        reasons: tuple[str, ...],
        gradient_bytes: int,
    ) -> None:
        self.pieces: int | None = None
        """Into how many pieces micro-batches of the present rollout are split; None before a decision."""
        self._session = session
        self._memory = memory
        self._train_call = train_call
        self._reasons = reasons
        self._gradient_bytes = gradient_bytes
        self._file: ForecastFile | None = ForecastFile(session.config.run_directory, session.rank)
        self._begun = False
        self._most_told = 1
        self._warned = False
        self._passed: dict[PassKind, tuple[Size, bool]] = {}
        """The largest pass of each kind in the phase that runs, and whether gradients were kept beside it."""
        self._plan = session.settings.memory_plan.model_copy(update={"micro_batch_divisor": 1}).text
        earlier = self._earlier()
        self._fits: dict[PassKind, PeakFit] = {"pass": _fit(earlier.passes), "score": _fit(earlier.scoring)}
        self._rollouts = OrderedDict((one.rollout, one) for one in earlier.rollouts)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Take the peaks of phases that the rank measures, for the length of the block."""
        accounting = self._session.accounting
        accounting.on_peak = self.phase_ended
        try:
            yield
        finally:
            accounting.on_peak = None

    def begin(self, rollout: GeneratedRollout) -> None:
        """Decide, with all ranks, into how many pieces the micro-batches of a rollout are split.
        Collective.
        """
        need = decide(
            rollout.rows,
            needed=functools.partial(self._needed, rollout),
            base_bytes=self._memory.allocated_bytes(),
            limit_bytes=self._memory.limit_bytes(),
            repeated=self._repeated(rollout),
        )
        agreed = agree([ForecastNeed(*one) for one in self._session.votes.gather(list(need))])
        if self._reasons:
            if agreed.pieces > 1:
                self._warn_once(agreed)
            agreed = agreed._replace(pieces=1)
        elif agreed.pieces != (self.pieces or 1):
            self._tell(rollout, agreed)
        self.pieces = agreed.pieces
        self._publish(rollout, need.limit_bytes)
        self._keep(rollout)

    def passed(self, kind: PassKind, size: Size, *, beside_gradients: bool = False) -> None:
        """Note a pass that begins.

        Args:
            beside_gradients: gradients of earlier passes are kept, or those of later ones will be.
        """
        simulated = self._memory.simulated_peak(size)
        if simulated is not None:
            self._measured(kind, size, simulated, simulated)
            return
        noted = self._passed.get(kind)
        if noted is None or size[0] * size[1] >= noted[0][0] * noted[0][1]:
            self._passed[kind] = size, beside_gradients

    def failed(self) -> None:
        """Measure nothing of the passes that have begun: one has raised, and its peak is not what it
        needs.
        """
        self._passed.clear()

    def phase_ended(self, phase: Phase, begun_bytes: int, peak_bytes: int) -> None:
        """Take what was measured of a phase.

        Args:
            begun_bytes: allocated when it began.
            peak_bytes: its peak.
        """
        kind = KINDS.get(phase)
        noted = self._passed.pop(kind, None) if kind is not None else None
        if kind is None or noted is None:
            return
        size, beside_gradients = noted
        above = peak_bytes - begun_bytes - (self._gradient_bytes if beside_gradients else 0)
        self._measured(kind, size, max(0, above), peak_bytes)

    def _measured(self, kind: PassKind, size: Size, above_bytes: int, peak_bytes: int) -> None:
        if self._fits[kind].add(size, above_bytes):
            # kept at once: the next attempt may begin with the next rollout
            self._append(**{"passes" if kind == "pass" else "scoring": [(*size, above_bytes)]})
        figures = self._session.slot.memory_area.forecast
        if peak_bytes > figures.observed_bytes and figures.rollouts:
            figures.observed_bytes = peak_bytes
            self._session.slot.memory_area.publish()

    def _needed(self, rollout: GeneratedRollout, rows: int, split: bool) -> Needed | None:
        size = rows, rollout.length
        backward = self._fits["pass"].predict(size)
        if backward is None:
            return None
        if split or rollout.accumulates:
            backward += self._gradient_bytes
        scoring = self._fits["score"].predict(size) or 0
        return Needed(max(backward, scoring), rows * rollout.length <= self._fits["pass"].most_tokens)

    def _repeated(self, rollout: GeneratedRollout) -> int:
        """Into how many pieces the same rollout was split in an earlier attempt; 0 if that is not known."""
        earlier = self._rollouts.get(rollout.number)
        same = earlier is not None and (earlier.rows, earlier.length) == (rollout.rows, rollout.length)
        return earlier.pieces if earlier is not None and same else 0

    def _tell(self, rollout: GeneratedRollout, agreed: Agreement) -> None:
        """Journal a change, and print the first one and each that splits further."""
        session, (first, last) = self._session, rollout.steps
        if not session.is_main:
            return
        need = agreed.need
        session.journal.write(
            MicroBatchesSplit(
                rank=session.rank,
                step=first,
                last_step=last,
                train_call=self._train_call,
                pieces=agreed.pieces,
                rows=rollout.rows,
                decided_by=agreed.rank,
                predicted_bytes=need.whole_bytes,
                predicted_split_bytes=need.split_bytes,
                limit_bytes=need.limit_bytes,
                observed_before_bytes=session.slot.memory_area.forecast.observed_bytes,
            )
        )
        if agreed.pieces > self._most_told:
            self._most_told = agreed.pieces
            steps = f"step {first}" if first == last else f"steps {first}-{last}"
            short = need.limit_bytes < need.split_bytes
            left = f"; {size_text(need.split_bytes)} still predicted" if short else ""
            session.notify(
                f"micro-batches are split by {agreed.pieces} for {steps}, with the same gradient:"
                f" {_predicted(agreed)}{left}"
            )

    def _warn_once(self, agreed: Agreement) -> None:
        if not self._warned:
            self._warned = True
            self._session.warn(
                f"the next steps may run out of GPU memory: {_predicted(agreed)}; micro-batches are not"
                f" split, because {'; '.join(self._reasons)}"
            )

    def _publish(self, rollout: GeneratedRollout, limit_bytes: int) -> None:
        """Publish what is predicted for the pieces that all ranks have agreed on."""
        assert self.pieces is not None
        area = self._session.slot.memory_area
        figures = area.forecast
        needed = self._needed(rollout, rows_of_pieces(rollout.rows, self.pieces)[0], self.pieces > 1)
        figures.predicted_bytes = (
            self._memory.allocated_bytes() + needed.peak_bytes if needed is not None else 0
        )
        figures.limit_bytes = limit_bytes
        figures.observed_bytes = 0
        figures.pieces = self.pieces
        figures.rollouts += 1
        figures.split_rollouts += self.pieces > 1
        area.publish()

    def _keep(self, rollout: GeneratedRollout) -> None:
        """Keep the decision for the next attempt."""
        assert self.pieces is not None
        decision = SplitRollout(
            rollout=rollout.number, rows=rollout.rows, length=rollout.length, pieces=self.pieces
        )
        self._rollouts[rollout.number] = decision
        self._rollouts.move_to_end(rollout.number)
        while len(self._rollouts) > MOST_ROLLOUTS:
            self._rollouts.popitem(last=False)
        self._append(rollouts=[decision])

    def _append(self, **entries: Any) -> None:
        """Add to the file; begin it anew with what counts if this attempt has not begun it, or if it is
        long.
        """
        if self._file is None:
            return
        try:
            if not self._begun or self._file.append(**entries):
                self._begun = True
                self._file.begin(
                    ForecastRecord(
                        train_call=self._train_call,
                        world_size=self._session.world_size,
                        plan=self._plan,
                        passes=_entries(self._fits["pass"]),
                        scoring=_entries(self._fits["score"]),
                        rollouts=tuple(self._rollouts.values()),
                    )
                )
        except OSError as error:
            self._file = None
            self._session.warn_in_journal(f"forecasts of memory are not kept for the next attempt: {error}")

    def _earlier(self) -> ForecastRecord:
        """What an earlier attempt has kept, as far as it holds for this call."""
        session = self._session
        found = read_forecast(session.config.run_directory, session.rank)
        nothing = ForecastRecord(train_call=self._train_call, world_size=session.world_size, plan=self._plan)
        if found is None or found.train_call != self._train_call or found.world_size != session.world_size:
            return nothing
        if found.plan != self._plan:
            return nothing.model_copy(update={"rollouts": found.rollouts})
        return found


def _fit(measured: Iterable[tuple[int, int, int]]) -> PeakFit:
    return PeakFit({(rows, length): peak for rows, length, peak in measured if rows * length > 0})


def _entries(fit: PeakFit) -> tuple[tuple[int, int, int], ...]:
    return tuple((rows, length, peak) for (rows, length), peak in fit.measured.items())


def _predicted(agreed: Agreement) -> str:
    need = agreed.need
    return (
        f"{size_text(need.whole_bytes)} predicted on rank {agreed.rank}, {size_text(need.limit_bytes)}"
        " available"
    )
