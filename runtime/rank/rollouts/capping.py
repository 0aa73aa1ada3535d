"""Cap the generation of one GRPO or RLOO trainer, and report why its completions ended.

`capping_of` makes it for a `train()` call, whose `runtime/rank/hooks/_rollout_hooks.py` puts its handlers
around two methods of the trainer: `_generate` begins a rollout, and what `_generate_single_turn` returns is
cut where a cap ended a completion. `apply` is the same for a script without `grpo-run launch`
(`trainers/caps.py`). The trainer itself builds ids, mask and lengths from it, before rewards and
log-probabilities are computed. Without a cap the trainer stays as it is.

The backend is checked when `train()` begins: vLLM detects repetitions itself (from version 0.17) and ends a
request at its maximum length, but has no time limit; continuous batching and `rollout_func` take no
criteria. Rollouts in which a cap ended a completion are journaled; with a deadline every rollout is, so that
it ends after the same token when it is generated again. Does not decide what a capped completion counts for.
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.event import Event
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.rank.rollouts import generate_calls
from grpo_run.runtime.rank.rollouts._prompts import check_prompts
from grpo_run.runtime.rank.rollouts._rollout import CAPPED, CappedRollout, Cut
from grpo_run.runtime.rank.rollouts.caps_settings import APPLIED, CapSettings, settings_of
from grpo_run.runtime.rank.rollouts.criteria import CapCriteria, Repetition
from grpo_run.runtime.rank.rollouts.deadline import (
    Deadline,
    DeadlineDecision,
    RolloutEnded,
    RolloutKey,
    read_decisions,
)
from grpo_run.runtime.rank.session import Session, current
from grpo_run.runtime.upstream import rollout_names, trainer_names
from grpo_run.runtime.upstream.features import CAPS, is_available
from grpo_run.runtime.upstream.patches import override_attributes, wrapped_methods
from grpo_run.watchdog.observation import EndReason

VLLM_LARGEST_PATTERN = 64
VLLM_SMALLEST_PATTERN = VLLM_LARGEST_PATTERN // 2 + 1
"""A loop of a shorter period also has a period between these two, so vLLM, which counts the same number of
repetitions for every period, asks about as many tokens of each."""
VLLM_MIN_COUNT = 3


def check(trainer: Any, settings: CapSettings) -> None:
    """Check that the trainer's backend can apply the caps.

    Raises:
        ConfigError: it cannot; the line says what to do.
    """
    if not settings.stops:
        return
    names = " and ".join(
        name
        for name, value in (("repetition", settings.repetition), ("max_time", settings.max_time))
        if value
    )
    if getattr(trainer, "rollout_func", None) is not None:
        raise ConfigError(
            f"--generation {names}: this trainer generates with its `rollout_func`, which accepts no stopping"
            " criteria; remove the cap, and use grpo_run.trainers.caps in the function"
        )
    if getattr(trainer, "use_transformers_continuous_batching", False):
        raise ConfigError(
            f"--generation {names}: continuous batching accepts no stopping criteria; remove the cap,"
            " or set use_transformers_continuous_batching=False"
        )
    if getattr(trainer, "use_vllm", False):
        if settings.max_time is not None:
            raise ConfigError(
                "--generation max_time: not supported by vLLM; remove the cap, or set use_vllm=False."
                " A rollout that does not end is found by the watchdog"
            )
        return
    beams = getattr(getattr(trainer, "generation_config", None), "num_beams", None) or 1
    if beams > 1:
        raise ConfigError(
            f"--generation {names}: not supported with beam search; remove the cap, or set num_beams to 1"
        )


def vllm_repetition(window: int) -> dict[str, int]:
    """Return the fields of vLLM's `RepetitionDetectionParams`.

    Args:
        window: tokens that a loop must have lasted.
    """
    return {
        "max_pattern_size": VLLM_LARGEST_PATTERN,
        "min_pattern_size": VLLM_SMALLEST_PATTERN,
        "min_count": max(VLLM_MIN_COUNT, math.ceil(window / VLLM_SMALLEST_PATTERN)),
    }


def vllm_cut(tokens: Sequence[int], end_tokens: Collection[int], window: int) -> Cut | None:
    """Return where vLLM's detection ended a completion, from its tokens: TRL does not pass the reason on.

    Args:
        tokens: as vLLM returned them.
        end_tokens: the tokens that end a completion by itself.
        window: tokens that a loop must have lasted.
    """
    if not tokens or tokens[-1] in end_tokens:
        return None
    fields = vllm_repetition(window)
    for period in range(fields["min_pattern_size"], fields["max_pattern_size"] + 1):
        last = tokens[-period * fields["min_count"] :]
        if len(last) == period * fields["min_count"] and last[period:] == last[:-period]:
            return Cut(length=len(tokens), reason=EndReason.repetition)
    return None


def vllm_keywords(mode: str, window: int) -> dict[str, Any]:
    """Return what is added to the sampling parameters of vLLM.

    Args:
        mode: `colocate` (an object of vLLM's) or `server` (JSON).
        window: tokens that a loop must have lasted.

    Raises:
        ConfigError: the installed vLLM does not detect repetitions.
    """
    fields = vllm_repetition(window)
    if mode == "server":
        return {"repetition_detection": fields}
    try:
        parameters = importlib.import_module("vllm.sampling_params").RepetitionDetectionParams
    except (ImportError, AttributeError):
        raise ConfigError(
            "--generation repetition: this vLLM does not detect repetitions; install vLLM 0.17 or later,"
            " remove the cap, or set use_vllm=False"
        ) from None
    return {"repetition_detection": parameters(**fields)}


GRPO_MODULE = "trl.trainer.grpo_trainer"
_HOOKS = "_grpo_run_caps_hooks"
"""Attribute of a trainer whose script has capped it without `grpo-run launch`: an open `ExitStack`."""


class CompletionsCapped(Event, kw_only=True, omit_defaults=True):
    """Completions of a rollout that did not end by themselves, by what has ended them."""

    completions: int
    decoding_steps: int
    repetition: int = 0
    deadline: int = 0


class Capping:
    """The caps of one trainer.

    Args:
        report: called with each rollout that has ended.
        decided: returns what the deadline did to the rollout that begins now, in an earlier attempt.
        clock: for the deadline, in seconds.

    Raises:
        ConfigError: the trainer's backend cannot apply the caps.
    """

    def __init__(
        self,
        trainer: Any,
        settings: CapSettings,
        *,
        report: Callable[[CappedRollout], None] = lambda rollout: None,
        decided: Callable[[], DeadlineDecision | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        generates = all(
            hasattr(trainer, name) for name in (trainer_names.GENERATE, trainer_names.SINGLE_TURN)
        )
        self._trainer = trainer
        self._settings = settings if generates and is_available(CAPS, trainer) else CapSettings()
        self._report = report
        self._decided = decided
        self._clock = clock
        self._rollout: CappedRollout | None = None
        self._last: CappedRollout | None = None
        self._refused: list[list[int]] = []
        """Completions of this rollout whose tools are not called."""
        check(trainer, self._settings)

    @property
    def applies(self) -> bool:
        """Whether there is something to cap."""
        return bool(self._settings)

    def end_reasons(self) -> tuple[EndReason, ...] | None:
        """Return why each completion of this rank's last rollout ended, in the trainer's order; None without
        caps.
        """
        return None if self._last is None else self._last.reasons

    def masked_rows(self, ends: Collection[str]) -> list[str] | None:
        """Return how a cap has ended each row of this rank's last rollout, where that takes it out of
        baseline and loss; None if no row of any rank can leave so.

        Args:
            ends: that take rows out.
        """
        possible = {
            EndReason.length.value: True,
            EndReason.repetition.value: self._settings.repetition is not None,
            EndReason.deadline.value: self._settings.max_time is not None,
        }
        if self._last is None or not any(possible[end] for end in ends):
            return None
        return [reason.value if reason.value in ends else "" for reason in self._last.reasons]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply the caps for the length of the block, on a trainer whose methods nothing else wraps."""
        handlers = {trainer_names.GENERATE: [self.cap_rollout], trainer_names.SINGLE_TURN: [self.cap_turn]}
        with self.prepared(), wrapped_methods(self._trainer, handlers if self.applies else {}):
            yield

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Change what the caps need besides the trainer's methods, for the length of the block."""
        if not self._settings:
            yield
            return
        with ExitStack() as hooks:
            trainer, vllm = self._trainer, getattr(self._trainer, "use_vllm", False)
            if vllm and self._settings.repetition is not None:
                engine = trainer.vllm_generation
                added = vllm_keywords(trainer.args.vllm_mode, self._settings.repetition)
                keywords = {**engine.generation_kwargs, **added}
                hooks.enter_context(override_attributes(engine, generation_kwargs=keywords))
            if self._settings.stops and not vllm:
                generate_calls.install()
            if self._settings.stops and getattr(trainer, "tools", None):
                hooks.enter_context(self._tools_refused())
            yield

    def cap_rollout(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Generate one rollout under the caps (`_generate`)."""
        self._rollout, self._refused = self._begin(), []
        try:
            result = original(*args, **kwargs)
            if self._settings.stops and not self._rollout.reasons:
                raise ConfigError(
                    f"caps on repetition and time did not take effect: {type(self._trainer).__name__}"
                    " generates in its own way. Use grpo_run.trainers.caps in its loop instead"
                )
            self._last = self._rollout
        finally:
            self._rollout = None
        self._report(self._last)
        return result

    def _begin(self) -> CappedRollout:
        seconds = self._settings.max_time
        return CappedRollout(
            end_tokens=rollout_names.end_tokens(self._trainer),
            max_length=self._trainer.max_completion_length or sys.maxsize,
            deadline=None if seconds is None else Deadline(seconds, clock=self._clock),
            decided=None if seconds is None else self._decided(),
        )

    def cap_turn(self, original: Callable[..., Any], prompts: Any, *args: Any, **kwargs: Any) -> Any:
        """Generate one turn of a rollout, and cut completions where a cap ended them
        (`_generate_single_turn`).
        """
        rollout = self._rollout
        if rollout is None:  # the script's own code generates
            return original(prompts, *args, **kwargs)
        uses_vllm = getattr(self._trainer, "use_vllm", False)
        turn = None
        with ExitStack() as hooks:
            if self._settings.stops and not uses_vllm:
                turn = generate_calls.Turn(functools.partial(self._criteria, rollout), rollout.end_tokens)
                hooks.enter_context(generate_calls.turn(turn))
            result = original(prompts, *args, **kwargs)
        pair = isinstance(result, tuple)
        completions: Sequence[Sequence[int]] = result[0] if pair else result
        cuts: Sequence[Cut | None] = [None] * len(completions)
        if turn is not None and turn.begun:
            cuts = turn.cuts([len(tokens) for tokens in completions])
            rollout.steps += turn.steps
        elif uses_vllm and self._settings.repetition is not None:
            window = self._settings.repetition
            cuts = [vllm_cut(tokens, rollout.end_tokens, window) for tokens in completions]
        ended = rollout.end_turn(prompts, completions, cuts)
        self._refused += [tokens for tokens, one in zip(ended, cuts, strict=True) if one is not None]
        return (ended, *result[1:]) if pair else ended

    def _criteria(
        self, rollout: CappedRollout, prompt_length: int, end_tokens: Collection[int], earlier: int
    ) -> CapCriteria:
        window = self._settings.repetition
        return CapCriteria(
            prompt_length,
            end_tokens,
            repetition=None if window is None else Repetition(prompt_length, window=window),
            out_of_time=lambda steps: rollout.out_of_time(earlier + steps),
        )

    @contextmanager
    def _tools_refused(self) -> Iterator[None]:
        """Leave out the tool calls of completions that a cap has ended: their text is not what the model
        meant to say.
        """
        module = sys.modules[GRPO_MODULE]
        original = getattr(module, trainer_names.PARSE_RESPONSE)

        @functools.wraps(original)
        def parse_response(tokenizer: Any, ids: Any, *args: Any, **kwargs: Any) -> Any:
            message = original(tokenizer, ids, *args, **kwargs)
            # a completion beyond the maximum length is shorter here than when it was cut
            if isinstance(ids, list) and any(tokens[: len(ids)] == ids for tokens in self._refused):
                message.pop("tool_calls", None)
            return message

        with override_attributes(module, **{trainer_names.PARSE_RESPONSE: parse_response}):
            yield


def apply(trainer: Any, *, repetition: int | None = None, max_time: float | None = None) -> None:
    """Cap a GRPO or RLOO trainer from code, also without `grpo-run launch`. Call it before `train()`.

    A cap that `--generation` sets as well has the value of the command line.

    Args:
        repetition: a completion in a loop is ended when the loop has lasted about so many tokens, at least 8.
        max_time: a rollout is ended after so many seconds.

    Raises:
        ConfigError: a value is out of range, or the trainer's backend cannot apply the cap.
    """
    settings = CapSettings(repetition=repetition, max_time=max_time)
    if APPLIED in vars(trainer):
        raise ConfigError("caps.apply was called twice for one trainer: give all caps in one call")
    capping = Capping(trainer, settings)
    setattr(trainer, APPLIED, settings)
    if current() is None:
        hooks = ExitStack()
        hooks.enter_context(capping.applied())
        setattr(trainer, _HOOKS, hooks)


def capping_of(
    trainer: Any, session: Session, train_call: int | None, timed_out: Callable[[], None] = lambda: None
) -> Capping | None:
    """Return the caps of a trainer, which are reported; None without a cap.

    Args:
        train_call: the number of the call; None for one inside another call's step.
        timed_out: called when a deadline has ended a rollout of this rank.

    Raises:
        ConfigError: the trainer's backend cannot apply a cap, or a prompt does not fit into the model's
            window.
    """
    settings = settings_of(trainer, session.config.generation)
    if not settings:
        return None
    reports = RolloutReports(trainer, session, settings, train_call, timed_out)
    capping = Capping(trainer, settings, report=reports.ended, decided=reports.begin)
    check_prompts(trainer)
    return capping if capping.applies else None


class RolloutReports:
    """Numbers the rollouts of one `train()` call on this rank and reports each.

    Args:
        train_call: the number of the call; without one, rollouts have no numbers and end by the clock alone.
        timed_out: called when a deadline has ended a rollout.
    """

    def __init__(
        self,
        trainer: Any,
        session: Session,
        settings: CapSettings,
        train_call: int | None,
        timed_out: Callable[[], None] = lambda: None,
    ) -> None:
        self._timed_out = timed_out
        self._trainer = trainer
        self._session = session
        self._train_call = train_call if settings.max_time is not None else None
        self._key: RolloutKey | None = None
        self._begun: Counter[tuple[int, str]] = Counter()
        self._decided: dict[RolloutKey, DeadlineDecision] = {}
        if self._train_call is not None:
            journal = RunDirectory(path=session.config.run_directory).journal
            self._decided = read_decisions(journal, session.rank, session.world_size)

    def begin(self) -> DeadlineDecision | None:
        """Number the rollout that begins, and return what the deadline did to it in an earlier attempt."""
        if self._train_call is None:
            return None
        step = self._trainer.state.global_step
        mode = "train" if self._trainer.model.training else "eval"
        self._key = RolloutKey(self._train_call, step, mode, self._begun[step, mode])
        self._begun[step, mode] += 1
        return self._decided.pop(self._key, None)

    def ended(self, rollout: CappedRollout) -> None:
        """Report a rollout."""
        session, reasons = self._session, Counter(rollout.reasons)
        if any(reasons[reason] for reason in CAPPED):
            session.journal.write(
                CompletionsCapped(
                    rank=session.rank,
                    step=self._trainer.state.global_step,
                    completions=len(rollout.reasons),
                    decoding_steps=rollout.steps,
                    repetition=reasons[EndReason.repetition],
                    deadline=reasons[EndReason.deadline],
                )
            )
        if rollout.timed_out_after is not None:
            self._timed_out()
        if self._key is not None:
            session.journal.write(
                RolloutEnded(
                    rank=session.rank,
                    world_size=session.world_size,
                    **self._key._asdict(),
                    decoding_steps=rollout.steps,
                    timed_out_after=rollout.timed_out_after,
                )
            )
