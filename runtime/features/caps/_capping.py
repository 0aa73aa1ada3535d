"""Cap the generation of one GRPO or RLOO trainer, and report why its completions ended.

Two methods of the trainer are wrapped: `_generate` begins a rollout, and what `_generate_single_turn` returns
is cut where a cap ended a completion. The trainer itself builds ids, mask and lengths from it, before rewards
and log-probabilities are computed. Rollouts in which a cap ended a completion are journaled; with a deadline
every rollout is. Does not decide what a capped completion counts for.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.features.caps._backends import CAPS, check, vllm_cut, vllm_keywords
from grpo_run.runtime.features.caps._configuration import CapSettings
from grpo_run.runtime.features.caps._criteria import Turn, turn, turn_of_script, without_effect
from grpo_run.runtime.features.caps._rollout import CappedRollout, Cut, DeadlineDecision
from grpo_run.runtime.rank.rollouts import generate_calls
from grpo_run.runtime.rank.rollouts.limits import Deadline
from grpo_run.runtime.upstream import rollout_names, trainer_names
from grpo_run.runtime.upstream.features import is_available
from grpo_run.runtime.upstream.patches import override_attributes, wrapped_methods
from grpo_run.runtime.upstream.trainer_kinds import TRAINERS
from grpo_run.watchdog.observation import EndReason


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
        self._own = self._settings.stops and getattr(trainer, "rollout_func", None) is not None
        self._seen = False
        """Whether the caps had something to end in the trainer's `rollout_func`."""
        check(trainer, self._settings)

    def end_reasons(self) -> tuple[EndReason, ...] | None:
        """Return why each completion of this rank's last rollout ended, in the trainer's order; None without
        caps.
        """
        return None if self._last is None else self._last.reasons

    def rows_left_out(self, ends: Collection[str]) -> list[str] | None:
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

    @property
    def applies(self) -> bool:
        """Whether there is something to cap."""
        return bool(self._settings)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply the caps for the length of the block, on a trainer whose methods nothing else wraps."""
        handlers = {trainer_names.GENERATE: [self.cap_rollout], trainer_names.SINGLE_TURN: [self.cap_turn]}
        with self.prepared(), wrapped_methods(self._trainer, handlers if self.applies else {}):
            yield

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Change what the caps need besides the trainer's methods, for the length of the block."""
        with ExitStack() as hooks:
            trainer, vllm = self._trainer, getattr(self._trainer, "use_vllm", False)
            if vllm and self._settings.repetition is not None:
                engine = trainer.vllm_generation
                added = vllm_keywords(trainer.args.vllm_mode, self._settings.repetition)
                keywords = {**engine.generation_kwargs, **added}
                hooks.enter_context(override_attributes(engine, generation_kwargs=keywords))
            if self._settings.stops and not vllm:
                generate_calls.install()
            if self._own:
                function = functools.partial(self._cap_script, trainer.rollout_func)
                hooks.enter_context(override_attributes(trainer, rollout_func=function))
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
        present = None
        with ExitStack() as hooks:
            if self._settings.stops and not uses_vllm:
                present = Turn(rollout, self._settings.repetition)
                hooks.enter_context(turn(present))
            result = original(prompts, *args, **kwargs)
        pair = isinstance(result, tuple)
        completions: Sequence[Sequence[int]] = result[0] if pair else result
        cuts: Sequence[Cut | None] = [None] * len(completions)
        if present is not None and present.begun:
            cuts = present.cuts([len(tokens) for tokens in completions])
            rollout.steps += present.steps
        elif uses_vllm and self._settings.repetition is not None:
            window = self._settings.repetition
            cuts = [vllm_cut(tokens, rollout.end_tokens, window) for tokens in completions]
        ended = rollout.end_turn(prompts, completions, cuts)
        self._refused += [tokens for tokens, one in zip(ended, cuts, strict=True) if one is not None]
        return (ended, *result[1:]) if pair else ended

    def _cap_script(self, original: Callable[..., Any], prompts: Any, *args: Any, **kwargs: Any) -> Any:
        """Let the trainer's `rollout_func` generate under the caps.

        A completion that a cap has ended is padded, where the function keeps that: the padding is left out.
        """
        rollout, settings = self._rollout, self._settings
        if rollout is None:
            return original(prompts, *args, **kwargs)
        present = Turn(rollout, settings.repetition, of_script=True)
        with turn_of_script(present):
            output = original(prompts, *args, **kwargs)
        if not self._seen:
            wrong = without_effect([present], settings, "this trainer's `rollout_func`")
            if wrong is not None:
                raise ConfigError(wrong)
            self._seen = True
        rollout.steps += present.steps
        completions = output[rollout_names.COMPLETION_IDS]
        cuts: list[Cut | None] = [None] * len(completions)
        if present.rows == len(completions):  # else it is not known which row became which completion
            cuts = present.cuts([len(tokens) for tokens in completions])
        padding = getattr(getattr(self._trainer, rollout_names.TOKENIZER, None), "pad_token_id", None)
        changed = {
            name: [
                row[: one.length] if one is not None and _is_padded(tokens, one, padding) else row
                for row, tokens, one in zip(output[name], completions, cuts, strict=True)
            ]
            for name in rollout_names.BY_TOKEN
            if output.get(name) is not None
        }
        output = {**output, **changed}
        rollout.end_turn(output[rollout_names.PROMPT_IDS], output[rollout_names.COMPLETION_IDS], cuts)
        return output

    @contextmanager
    def _tools_refused(self) -> Iterator[None]:
        """Leave out the tool calls of completions that a cap has ended: their text is not what the model
        meant to say.
        """
        module = sys.modules[TRAINERS["grpo"].module]
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


def _is_padded(tokens: Sequence[int], cut: Cut, padding: int | None) -> bool:
    """Whether nothing but padding follows where a completion was ended."""
    return set(tokens[cut.length :]) == {padding}
