"""Applies the caps to the generation of one GRPO or RLOO trainer.

`hooks/rollouts.py` enters `Capping.applied` for the length of a `train()` call; `apply` does the same for a script
without `grpo-run launch`. Two methods of the trainer are wrapped: `_generate` begins a rollout, and what
`_generate_single_turn` returns is cut where a cap ended a completion. The trainer itself then builds ids, mask and
lengths from it, before rewards and log-probabilities are computed. Does not decide what a capped completion counts for.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from grpo_run.runtime.errors import ConfigError
from grpo_run.trainers.caps import backends
from grpo_run.trainers.caps.calls import generation
from grpo_run.trainers.caps.criteria import CapCriteria
from grpo_run.trainers.caps.deadline import Deadline
from grpo_run.trainers.caps.decisions import Decision
from grpo_run.trainers.caps.end_reasons import Cut
from grpo_run.trainers.caps.repetition import Repetition
from grpo_run.trainers.caps.rollout import Rollout
from grpo_run.trainers.caps.settings import APPLIED, CapSettings
from grpo_run.trainers.patches import override_attributes
from grpo_run.trainers.rank.session import current
from grpo_run.trainers.upstream import generation_names, trainer_names
from grpo_run.watchdog.observation import EndReason

GRPO_MODULE = "trl.trainer.grpo_trainer"
_HOOKS = "_grpo_run_caps_hooks"
"""Attribute of a trainer whose script has capped it without `grpo-run launch`: an open `ExitStack`."""


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
        report: Callable[[Rollout], None] = lambda rollout: None,
        decided: Callable[[], Decision | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        generates = all(
            hasattr(trainer, name) for name in (trainer_names.GENERATE, generation_names.SINGLE_TURN)
        )
        self._trainer = trainer
        self._settings = settings if generates else CapSettings()
        self._report = report
        self._decided = decided
        self._clock = clock
        self._rollout: Rollout | None = None
        self._last: Rollout | None = None
        self._refused: list[list[int]] = []
        """Completions of this rollout whose tools are not called."""
        backends.check(trainer, self._settings)

    def end_reasons(self) -> tuple[EndReason, ...] | None:
        """Return why each completion of this rank's last rollout ended, in the trainer's order; None without caps."""
        return None if self._last is None else self._last.reasons

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply the caps for the length of the block."""
        if not self._settings:
            yield
            return
        with ExitStack() as hooks:
            trainer, vllm = self._trainer, getattr(self._trainer, "use_vllm", False)
            for name, wrapper in (
                (trainer_names.GENERATE, self._generate),
                (generation_names.SINGLE_TURN, self._single_turn),
            ):
                method = getattr(trainer, name)
                wrapped = functools.wraps(method)(functools.partial(wrapper, method))
                hooks.enter_context(override_attributes(trainer, **{name: wrapped}))
            if vllm and self._settings.repetition is not None:
                engine = trainer.vllm_generation
                added = backends.vllm_keywords(trainer.args.vllm_mode, self._settings.repetition)
                keywords = {**engine.generation_kwargs, **added}
                hooks.enter_context(override_attributes(engine, generation_kwargs=keywords))
            if self._settings.stops and not vllm:
                generation.install()
            if self._settings.stops and getattr(trainer, "tools", None):
                hooks.enter_context(self._tools_refused())
            yield

    def _generate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`_generate`: one rollout."""
        self._rollout, self._refused = self._begin(), []
        try:
            result = original(*args, **kwargs)
            if self._settings.stops and not self._rollout.reasons:
                raise ConfigError(
                    f"caps on repetition and time did not take effect: {type(self._trainer).__name__} generates in"
                    " its own way. Use grpo_run.trainers.caps in its loop instead"
                )
            self._last = self._rollout
        finally:
            self._rollout = None
        self._report(self._last)
        return result

    def _begin(self) -> Rollout:
        seconds = self._settings.max_time
        return Rollout(
            end_tokens=frozenset(getattr(self._trainer, generation_names.EOS_TOKENS)),
            max_length=self._trainer.max_completion_length or sys.maxsize,
            deadline=None if seconds is None else Deadline(seconds, clock=self._clock),
            decided=None if seconds is None else self._decided(),
        )

    def _single_turn(self, original: Callable[..., Any], prompts: Any, *args: Any, **kwargs: Any) -> Any:
        """`_generate_single_turn`: one turn of a rollout."""
        rollout = self._rollout
        if rollout is None:  # the script's own code generates
            return original(prompts, *args, **kwargs)
        uses_vllm = getattr(self._trainer, "use_vllm", False)
        turn = None
        with ExitStack() as hooks:
            if self._settings.stops and not uses_vllm:
                turn = generation.Turn(functools.partial(self._criteria, rollout), rollout.end_tokens)
                hooks.enter_context(generation.turn(turn))
            result = original(prompts, *args, **kwargs)
        pair = isinstance(result, tuple)
        completions: Sequence[Sequence[int]] = result[0] if pair else result
        cuts: Sequence[Cut | None] = [None] * len(completions)
        if turn is not None and turn.begun:
            cuts = turn.cuts([len(tokens) for tokens in completions])
            rollout.steps += turn.steps
        elif uses_vllm and self._settings.repetition is not None:
            window = self._settings.repetition
            cuts = [backends.vllm_cut(tokens, rollout.end_tokens, window) for tokens in completions]
        ended = rollout.end_turn(prompts, completions, cuts)
        self._refused += [tokens for tokens, one in zip(ended, cuts, strict=True) if one is not None]
        return (ended, *result[1:]) if pair else ended

    def _criteria(
        self, rollout: Rollout, prompt_length: int, end_tokens: Collection[int], earlier: int
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
        """Leave out the tool calls of completions that a cap has ended: their text is not what the model meant to say."""
        module = sys.modules[GRPO_MODULE]
        original = getattr(module, generation_names.PARSE_RESPONSE)

        @functools.wraps(original)
        def parse_response(tokenizer: Any, ids: Any, *args: Any, **kwargs: Any) -> Any:
            message = original(tokenizer, ids, *args, **kwargs)
            # a completion beyond the maximum length is shorter here than when it was cut
            if isinstance(ids, list) and any(tokens[: len(ids)] == ids for tokens in self._refused):
                message.pop("tool_calls", None)
            return message

        with override_attributes(module, **{generation_names.PARSE_RESPONSE: parse_response}):
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
