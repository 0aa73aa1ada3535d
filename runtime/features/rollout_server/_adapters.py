"""The chain of custody of AsyncGRPO, whose policies are adapters: does each name answer as its policy does?

A sample names its policy in the request (`trl-policy-vN`), and vLLM refuses a name that it does not know.
What is left is a server that knows the name and answers with other weights, such as those of its model. Rank
0 therefore asks for the log-probabilities of one fixed prompt: with the model's name once, with an adapter's
after it was loaded, and with the names of all policies that samples may come from before each step. A name
that answers as the model or as another policy does, several times closer than as itself, ends the attempt on
all ranks before the step is trained (`Cause.rollout_stale`), and the supervisor starts the server again.

Nothing is compared with the trainer's own log-probabilities, whose arithmetic differs, and nothing has to be
equal: on a GPU, an answer depends on what else is in the batch. As long as an adapter moves the answers by
less than they differ by themselves, nothing is said of it (`SampleOrigin.cannot_tell`): in the first steps
its product is nearly zero. `PolicyAnswers` is pure; `AsyncCustody` is called by `rank.py`.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from accelerate.utils import broadcast_object_list

from grpo_run.runtime.errors import AlarmRaised
from grpo_run.runtime.features.rollout_server._custody import read_alarm_step, stale_alarm
from grpo_run.runtime.features.rollout_server._evidence import ASK_SECONDS, FACTOR, PROMPT, TRIES
from grpo_run.runtime.features.rollout_server._watch import ServerError, model_of, request
from grpo_run.runtime.features.rollout_server.events import RolloutMade, SampleOrigin, WeightsSent
from grpo_run.runtime.rank.points import CallPoints
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.upstream import async_grpo_names, vllm_names
from grpo_run.runtime.upstream.patches import wrapped_methods

Scores = Sequence[float]
"""Log-probabilities of the tokens of the prompt."""
FLOOR = 1e-6
"""Of the differences between equal answers, in nats: a server that is repeatable has none."""
LEAST_REPEATS = 5
"""How often adapters must have answered again before their answers are judged."""


def distance(one: Scores, other: Scores) -> float:
    """Return the greatest difference between two answers; infinity if they are not of the same prompt."""
    if len(one) != len(other):
        return float("inf")
    return max((abs(a - b) for a, b in zip(one, other, strict=True)), default=float("inf"))


class PolicyAnswers:
    """What a server has answered with each name.

    Args:
        ask: returns the answer with a name, the model's own with ""; None if there is none.
        kept: how many policies samples may come from.
    """

    def __init__(self, ask: Callable[[str], Scores | None], kept: int) -> None:
        self._ask, self._kept = ask, kept
        self._base: Scores | None = None
        self._held: dict[str, Scores] = {}
        self._doubt = ""
        self._repeats, self._noise, self._moved = 0, FLOOR, 0.0
        self._blind = 0
        """So many policies have to be loaded until all that samples may come from are known again."""

    def loaded(self, name: str) -> None:
        """Note that an adapter was loaded, and take its answer."""
        self._base = self._base or self._ask("")
        last = next(reversed(self._held.values()), None)
        scores: Scores | None = None
        for _ in range(TRIES):
            scores = self._ask(name)
            if self._base is None or scores is None:
                self._blind = self._kept
                self._held.clear()
                return
            before, jump = (distance(last or scores, one) for one in (self._base, scores))
            far = before > FACTOR * max(self._moved, self._reach)
            if not far or FACTOR * distance(scores, self._base) >= jump:
                self._moved = max(self._moved, jump)
                break
        else:
            self._doubt = f"{name} answers as the model without an adapter"
        assert scores is not None
        self._blind = max(0, self._blind - 1)
        self._held[name] = scores
        for old in list(self._held)[: -self._kept]:
            del self._held[old]

    def doubt(self) -> str:
        """Ask all policies again; return why one does not answer as itself, as a clause, "" if all do."""
        if self._base is None or self._doubt:
            return self._doubt
        for name, own in list(self._held.items()):
            others = {one: scores for one, scores in self._held.items() if one != name}
            for _ in range(TRIES):
                scores = self._ask(name)
                if scores is None:
                    self._blind = self._kept
                    break
                off = distance(scores, own)
                named = {"the model without an adapter": self._base, **others}
                other = next((one for one, at in named.items() if FACTOR * distance(scores, at) < off), "")
                if not other or off <= self._reach or self._repeats < LEAST_REPEATS:
                    self._repeats, self._noise = self._repeats + 1, max(self._noise, off)
                    break
            else:
                return f"{name} answers as {other}"
        return ""

    @property
    def vouch(self) -> bool:
        """Whether the answers of all policies are known to differ from the model's."""
        base = self._base
        known = base is not None and bool(self._held) and not self._blind and self._repeats >= LEAST_REPEATS
        return known and all(distance(one, base or ()) > self._reach for one in self._held.values())

    @property
    def _reach(self) -> float:
        """How far two answers of one name may be from each other."""
        return FACTOR * self._noise


class AsyncCustody:
    """Of one trainer of AsyncGRPO; called on all ranks.

    Args:
        session: of this rank.
        points: of the call; the check before each step is added.
    """

    def __init__(self, session: Session, points: CallPoints) -> None:
        self._session, self._trainer = session, points.trainer
        self._alarm_step = read_alarm_step(session, points.train_call)
        self._answers: PolicyAnswers | None = None
        self._samples = 0
        place = async_grpo_names.adapter_folder(points.trainer)  # None on other ranks than 0
        if place is not None:
            kept = async_grpo_names.staleness(points.trainer) + 1
            self._answers = PolicyAnswers(functools.partial(ask_scores, place[0]), kept)
        points.hooks.enter_context(
            wrapped_methods(points.trainer, {name: [self._send] for name in vllm_names.ASYNC_SYNCS})
        )
        points.step_begins.append(self._check)

    def took(self, sample: Any) -> None:
        """Count a sample that the trainer has taken from its process, unless it drops it as too old."""
        self._samples += not async_grpo_names.is_too_old(self._trainer, sample)

    def _send(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Send weights, and ask for an answer with them once the server goes on."""
        began = time.monotonic()
        result = original(*args, **kwargs)
        if self._session.is_main:
            step, name = int(self._trainer.state.global_step), async_grpo_names.policy(self._trainer)
            seconds = time.monotonic() - began
            self._session.journal.write(WeightsSent(rank=0, step=step, version=name, seconds=seconds))
            if self._answers is not None:
                self._answers.loaded(name)
        return result

    def _check(self, step: int) -> None:
        """Judge the names that the samples of a step may have asked for.

        Raises:
            AlarmRaised: one answers as another; on all ranks.
        """
        if not async_grpo_names.sends_adapters(self._trainer):
            return self._write(step, SampleOrigin.cannot_tell)
        found = [self._answers.doubt() if self._answers is not None else ""]
        broadcast_object_list(found, from_process=0)
        doubt = found[0]
        if not doubt:
            vouch = self._answers is not None and self._answers.vouch
            return self._write(step, SampleOrigin.meant if vouch else SampleOrigin.cannot_tell)
        text = f"the samples of step {step} are not of the weights that were sent: {doubt}"
        if step > self._alarm_step:
            self._write(step, SampleOrigin.stale, doubt)
            raise AlarmRaised(stale_alarm(step, text, "adapter"))
        self._session.warn(
            f"{text}, also after the server was started again; from here on this counts as usual"
        )
        self._answers = None
        return self._write(step, SampleOrigin.cannot_tell)

    def _write(self, step: int, origin: SampleOrigin, because: str = "log-probabilities") -> None:
        if self._session.is_main and self._samples:
            because = "" if origin is SampleOrigin.cannot_tell else because
            self._session.journal.write(
                RolloutMade(rank=0, step=step, samples=self._samples, origin=str(origin), because=because)
            )
        self._samples = 0


def ask_scores(base_url: str, name: str) -> Scores | None:
    """Return what a server answers with an adapter, or with its model if the name is empty; None if it does
    not.
    """
    try:
        question = {
            "model": name or model_of(base_url, seconds=ASK_SECONDS), "prompt": list(PROMPT),
            "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0,
        }  # fmt: skip
        status, body = request(base_url, "POST", "/v1/completions", question, seconds=ASK_SECONDS)
        tokens = json.loads(body)["choices"][0]["prompt_logprobs"][1:] if status == 200 else []
        return [one["logprob"] for token in tokens for one in token.values()] or None
    except (OSError, ServerError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
