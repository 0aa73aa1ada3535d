"""The chain of custody: which weights each rollout of a trainer comes from, and rollouts that are made again.

All ranks go through the methods of `Custody`, which are called around TRL's sending of weights, around each
generation and around each rollout. Rank 0 asks the server for evidence (`_evidence.py`), and all ranks take
what it says from a broadcast, so that none of them is alone in a collective. A rollout of other weights is
thrown away before it is trained on: the weights are sent again, and it is made again with the random
generators as before it, so the run ends in the same weights as an undisturbed one.

If that does not help, the attempt ends (`Cause.rollout_stale`), and the supervisor starts the server again.
If it does not help then either, the evidence is not what was thought: the run goes on without it, with a
warning, and says of its samples that their origin is unknown. A healthy run is thus held up once.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sized
from contextlib import AbstractContextManager
from typing import Any

from accelerate.utils import broadcast_object_list

from grpo_run.runtime.errors import AlarmRaised
from grpo_run.runtime.features.rollout_server._evidence import Differences, Digest, Doubt, HeldWeights, Kind
from grpo_run.runtime.features.rollout_server._repeating import remembered
from grpo_run.runtime.features.rollout_server._seeds import CONCURRENT, Seeds
from grpo_run.runtime.features.rollout_server.events import RolloutMade, SampleOrigin, WeightsSent
from grpo_run.runtime.features.rollout_server.settings import NAME
from grpo_run.runtime.history.events import IncidentConfirmed
from grpo_run.runtime.history.journal import read_newest
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.rank.points import CallPoints
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.upstream import rollout_names, trainer_names, vllm_names
from grpo_run.runtime.upstream.patches import wrapped_methods
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.observation import Alarm

MAX_JOURNAL_BYTES = 1 << 20


def read_stale_faults(session: Session) -> list[IncidentConfirmed]:
    """Return the faults by which earlier attempts were ended because of stale rollouts."""
    if not session.settings.attempt:
        return []
    journal = RunDirectory(path=session.config.run_directory).journal
    incidents = read_newest(journal, IncidentConfirmed, MAX_JOURNAL_BYTES)
    return [one for one in incidents if one.cause == Cause.rollout_stale]


def read_alarm_step(session: Session, train_call: int) -> int:
    """Return the step of a call at which the attempt before was ended because of stale rollouts; 0 if it was
    not.
    """
    ended = (session.settings.attempt - 1, train_call)
    steps = [one.step or 0 for one in read_stale_faults(session) if (one.attempt, one.train_call) == ended]
    return max(steps, default=0)


def stale_alarm(step: int, text: str, evidence: str) -> Alarm:
    """Return the alarm that ends an attempt because of stale rollouts, as a clause says."""
    return Alarm(
        cause=str(Cause.rollout_stale), step=step, sentence=f"{text[0].upper()}{text[1:]}.",
        signature=f"rollout_stale:{evidence}",
        advice=("Look at the log of the rollout server, and at who else sends it weights.",),
    )  # fmt: skip


class Custody:
    """Of one trainer that generates with a server."""

    def __init__(self, session: Session, points: CallPoints) -> None:
        self._session = session
        self._trainer = points.trainer
        self._generation = getattr(points.trainer, vllm_names.GENERATION)
        self._client = getattr(self._generation, vllm_names.CLIENT, None)  # of rank 0
        self._alarm_step = read_alarm_step(session, points.train_call)
        foreign = not session.settings.features.get(NAME)
        self._distrusted = foreign and bool(read_stale_faults(session))
        """The server was found to hold other weights, and this run has not started it again."""
        self._held = HeldWeights(self._client, session.warn_in_journal)
        self._differences = Differences()
        self._sent = 0
        self._digest = Digest()
        self._seeds = Seeds(points.trainer, points.train_call)
        if session.is_main:
            points.hooks.enter_context(self._client_observed(self._client))
        handlers = {vllm_names.SYNC: [self.sync], vllm_names.GENERATE: [self.generate]}
        points.hooks.enter_context(wrapped_methods(self._generation, handlers))
        points.states.append(self)

    def sync(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Send the weights, and tell the server what they are called."""
        if self._session.is_main and self._held.lost():
            self._session.warn("the rollout server was started again: it is sent the weights of this step")
            self._join_anew()
        began = time.monotonic()
        self._digest = Digest()
        result = original(*args, **kwargs)
        if self._session.is_main:
            self._sent += 1
            seconds = time.monotonic() - began
            run, attempt = self._session.config.run_id, self._session.settings.attempt
            version, digest = f"{run}:{attempt}:{self._step}:{self._sent}", self._digest.text()
            self._held.sent(version, digest)
            self._session.journal.write(
                WeightsSent(rank=0, step=self._step, version=version, digest=digest, seconds=seconds)
            )
        return result

    def generate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Generate one turn, with the weights that were sent last before it and after it."""
        same_seeds, trial = self._seeds.remembered(), 0
        while True:
            samples, doubt = 0, self._agreed(functools.partial(self._held.doubt, generated=False))
            if doubt is None:
                generated = original(*args, **kwargs)
                doubt = self._agreed(self._held.doubt)
                if doubt is None:
                    return generated
                samples = self._count(generated[rollout_names.COMPLETIONS])
            self._answer(doubt, trial, samples)
            same_seeds()
            trial += 1

    def make(self, original: Callable[..., Any], inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a rollout, and judge by its log-probabilities where it comes from."""
        if not self._trainer.model.training:
            return original(inputs, *args, **kwargs)
        samples = self._count(inputs)
        for trial in itertools.count():
            restore, same_seeds = remembered(self._trainer), self._seeds.remembered()
            before = len(self._logged)
            made = original(inputs, *args, **kwargs)
            difference = self._logged[-1] if len(self._logged) > before else math.nan
            doubt = self._agreed(functools.partial(self._judge, difference))
            if doubt is None or self._answer(doubt, trial, samples):
                break
            restore()
            same_seeds()
        vouching = [*self._held.given]
        if math.isfinite(difference):
            self._differences.accept(difference)
        if (
            self._held.ignored or self._distrusted
        ):  # whatever else vouches for it, something has said otherwise
            vouching.clear()
        self._write(
            samples, SampleOrigin.meant if vouching else SampleOrigin.cannot_tell, ", ".join(vouching)
        )
        return made

    def state(self) -> Mapping[str, Any]:
        """Return what a checkpoint holds: the baseline, the fingerprints that are known, and evidence that
        is ignored.
        """
        ignored = sorted(map(str, self._held.ignored))
        return {
            NAME: {"differences": self._differences.accepted, "known": self._held.known, "ignored": ignored}
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; nothing from a checkpoint without it, or of another format."""
        kept = state.get(NAME, {})
        try:
            self._differences.accepted = [float(one) for one in kept.get("differences", ())]
            self._held.known = {str(key): str(value) for key, value in kept.get("known", {}).items()}
            self._held.ignored = {Kind(one) for one in kept.get("ignored", ())}
        except (AttributeError, TypeError, ValueError) as error:
            self._session.warn_in_journal(f"the origin of rollouts is judged without a baseline: {error}")

    def _answer(self, doubt: Doubt, trial: int, samples: int = 0) -> bool:
        """Answer a doubt on all ranks: send the weights again; at the second time end the attempt. Return
        whether the doubt is put aside, because the attempt before was ended for it.

        Args:
            trial: how often this rollout or turn was in doubt before.
            samples: of all ranks, that are thrown away.

        Raises:
            AlarmRaised: it is in doubt again.
        """
        text = f"a rollout of step {self._step} is not of the weights that were sent last: {doubt.text}"
        if trial and self._step > self._alarm_step:
            raise AlarmRaised(stale_alarm(self._step, text, doubt.kind))
        if trial:
            self._session.warn(
                f"{text}, also after the server was started again; from here on this counts as usual, and the"
                " origin of samples as unknown"
            )
            self._held.ignored.add(doubt.kind)
            self._differences.accepted.clear()
            return True
        self._session.warn(f"{text}; they are sent again, and it is made again")
        if samples:
            self._write(samples, SampleOrigin.stale, doubt.text)
        if self._session.is_main:
            self._join_anew()
        getattr(self._generation, vllm_names.SYNC)()
        return False

    def _judge(self, difference: float) -> Doubt | None:
        """Judge a rollout that was made; a `rollout_func` of the script may not have called `generate`."""
        asked = self._held.doubt() if getattr(self._trainer, "rollout_func", None) is not None else None
        return asked or self._differences.doubt(difference)

    def _agreed(self, ask: Callable[[], Doubt | None]) -> Doubt | None:
        """Return what rank 0 has found. Collective."""
        found = [ask() if self._session.is_main else None]
        broadcast_object_list(found, from_process=0)
        return found[0]

    def _join_anew(self) -> None:
        """Make the group anew through which weights are sent: a server that was started again is in none."""
        getattr(self._client, vllm_names.LEAVE)()
        getattr(self._client, vllm_names.JOIN)(device=self._trainer.accelerator.device)
        self._held.forget()

    def _client_observed(self, client: Any) -> AbstractContextManager[None]:
        """Digest what the client sends, and give its requests seeds."""
        client.session.get_adapter(client.base_url).init_poolmanager(1, CONCURRENT)
        seeded = {name: [self._seeds.send] for name in vllm_names.CLIENT_GENERATES}
        return wrapped_methods(client, {vllm_names.SEND: [self._digest_sent], **seeded})

    def _digest_sent(
        self, original: Callable[..., Any], metadata: Any, tensors: Iterable[Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Send tensors, and digest them."""
        return original(metadata, self._digest.over(tensors), *args, **kwargs)

    def _count(self, rows: Sized) -> int:
        """Return how many samples all ranks have, each as many as this one."""
        return len(rows) * self._session.world_size

    def _write(self, samples: int, origin: SampleOrigin, because: str) -> None:
        if self._session.is_main:
            self._session.journal.write(
                RolloutMade(rank=0, step=self._step, samples=samples, origin=str(origin), because=because)
            )

    @property
    def _step(self) -> int:
        """The optimizer step that is being computed."""
        return int(self._trainer.state.global_step) + 1

    @property
    def _logged(self) -> list[float]:
        """The differences of rollouts that TRL has collected for its next log line."""
        tables = getattr(self._trainer, trainer_names.METRICS, None) or {}
        values = tables.get("train", {}).get(vllm_names.DIFFERENCE, [])
        return list(values)
