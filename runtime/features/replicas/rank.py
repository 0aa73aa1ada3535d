"""Replicas in a rank: compare after every so many steps, and end the attempt if ranks differ.

The ranks compare one number first, and the digests of all tensors only if it differs. The vote on each step
has the norm of the gradients that they have reduced: if it differs, they compare at the end of the next step.
What differs at the first comparison of a call, as local parameters do, is excluded from then on, which a
checkpoint remembers; so is what differs in the same bits after an exact repetition, if no majority shows
which rank is wrong. A layout that spreads parameters over ranks has no second copy of them, so nothing is
compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_run.runtime.features.replicas._digests import (
    differing_element,
    element,
    far_from,
    minority,
    tensors_in_common,
)
from grpo_run.runtime.features.replicas.events import ReplicaNamed, ReplicasCompared
from grpo_run.runtime.features.replicas.settings import Difference, RankReplicas, ReplicaSettings
from grpo_run.runtime.rank.points import CallPoints, RankFeature
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.rank.tensor_digests import combined, digests
from grpo_run.runtime.rank.trainer_facts import REPLICATED
from grpo_run.runtime.rank.vote import to_bits
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.observation import Alarm
from grpo_run.watchdog.text import counted, rank_names

LAYOUTS = (REPLICATED, "deepspeed-zero0", "deepspeed-zero1", "deepspeed-zero2")
"""In which every rank holds all parameters."""
STATE = "replicas"
_UNREADABLE = -1
"""In place of the number of tensors."""
ADVICE = (
    "Test the device of the rank before it is used again: nvidia-smi -q -d ECC, and dcgmi diag -r 3.",
    "If a script changes parameters on one rank on purpose, switch this off: --compare-every 0.",
)


class Comparison:
    """What the ranks of one call hold in common.

    Args:
        told: differences of earlier attempts.
    """

    def __init__(self, session: Session, points: CallPoints, every: int, told: RankReplicas) -> None:
        self._session = session
        self._points = points
        self._every = every
        self._earlier = {one.place for one in told.differences if not one.ranks}
        self._open = [one for one in told.open if one.train_call == points.train_call]
        self._told = False
        self._excluded: set[str] | None = None
        self._agreed = 0
        self._norms_agreed: bool | None = False
        """Whether ranks have had the same norm, not 0, in this attempt; None if it is a rank's own."""

    def end_step(self, step: int) -> None:
        """Compare if it is time to, if the script saves after this step, if norms differed in the last vote,
        or if an earlier attempt found a difference here. Collective.
        """
        differed = self._norms_differed()
        self._points.common = 0 if self._norms_agreed is None else _bits(self._points.gradient_norm())
        if not self._every:
            return
        saves = int(getattr(getattr(self._points.trainer, "state", None), "save_steps", 0) or 0)
        due = step % self._every == 0 or (saves and step % saves == 0)
        if differed or due or any(one.step == step for one in self._open):
            self._compare(step)
        if differed and self._agreed == step:  # in everything that is trained
            self._leave_norms()

    def _norms_differed(self) -> bool:
        """Whether ranks had different norms in the last vote, after they had equal ones."""
        agreed, self._points.agreed = self._points.agreed, 0
        if agreed is not None:
            self._norms_agreed = self._norms_agreed if not agreed else True
        elif not self._norms_agreed:
            self._leave_norms()
        return agreed is None and bool(self._norms_agreed)

    def _leave_norms(self) -> None:
        """Compare norms no longer in this attempt: each rank has its own."""
        self._norms_agreed, self._points.common = None, 0
        if self._session.is_main:
            self._session.warn("norms of the gradients differ between ranks: they are not compared")

    def _compare(self, step: int) -> None:
        """Compare what ranks hold in common."""
        optimizers = self._points.present_optimizers() if self._points.trainer is not None else ()
        in_common = tensors_in_common(self._points.models, optimizers)
        tensors = {name: tensor for name, tensor in in_common if name not in (self._excluded or ())}
        gather = self._session.votes.gather
        try:
            values = digests(list(tensors.values()))
        except (RuntimeError, TypeError) as error:  # a kind of tensor whose bits cannot be read
            self._session.warn_in_journal(
                f"parameters are not compared: {type(error).__name__}: {error}"[:500]
            )
            rows = gather([_UNREADABLE, 0])
        else:
            rows = gather([len(values), combined(values)])
        if any(count == _UNREADABLE for count, _ in rows):
            self._every = 0  # on all ranks, so that they go on alike
            return
        if len({count for count, _ in rows}) > 1:
            self._begin(tensors, set(tensors))  # not the same tensors on all ranks
            return
        sums = [value for _, value in rows]
        if len(set(sums)) == 1:
            self._agree(step, tensors)
            return
        columns = zip(*gather(values), strict=True)
        wrong = [name for name, column in zip(tensors, columns, strict=True) if len(set(column)) > 1]
        if self._excluded is None:
            self._begin(tensors, set(wrong))
            self._agreed = step
        else:
            position, bits = differing_element(tensors[wrong[0]], gather)
            found = Difference(
                train_call=self._points.train_call,
                step=step,
                agreed=self._agreed,
                count=len(wrong),
                name=wrong[0],
                position=position,
                bits=bits,
                ranks=minority(sums),
            )
            if found.place in self._earlier:
                self._differ_on_purpose(found, tensors, wrong)
            else:
                self._differ(found)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds, as plain JSON values."""
        if self._excluded is None:
            return {}
        return {STATE: {"excluded": sorted(self._excluded), "agreed": self._agreed}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; nothing from a checkpoint without it."""
        match state.get(STATE):
            case {"excluded": [*names], "agreed": int(agreed)}:
                self._excluded, self._agreed = set(map(str, names)), agreed

    def _begin(self, tensors: Mapping[str, Any], excluded: set[str]) -> None:
        """Note what is compared from here on."""
        if self._excluded is None and excluded and self._session.is_main:
            first = next(name for name in tensors if name in excluded)
            self._session.warn(
                f"{len(excluded)} of {counted(len(tensors), 'tensor')} differ between ranks, first {first}:"
                " they are not compared"
            )
        self._excluded = (self._excluded or set()) | excluded
        self._told = True
        if self._session.is_main:
            self._session.journal.write(
                ReplicasCompared(
                    rank=0,
                    train_call=self._points.train_call,
                    tensors=len(tensors) - len(excluded),
                    excluded=len(self._excluded),
                )
            )

    def _agree(self, step: int, tensors: Mapping[str, Any]) -> None:
        """All ranks are equal; if they were not at this step before, the ranks that were wrong are known."""
        if not self._told:
            self._begin(tensors, set())
        self._agreed = step
        for one in [one for one in self._open if one.step == step and one.name in tensors]:
            self._open.remove(one)
            if not self._session.is_main:
                continue
            ranks = far_from(element(tensors[one.name], one.position), one.bits)
            self._session.journal.write(
                ReplicaNamed(rank=0, step=step, train_call=one.train_call, ranks=ranks)
            )
            shows = f"{rank_names(ranks)} computed wrongly" if ranks else "no rank that was wrong alone"
            self._session.warn(f"the exact repetition of step {step} shows {shows}")

    def _differ_on_purpose(self, found: Difference, tensors: Mapping[str, Any], wrong: Sequence[str]) -> None:
        """Exclude what an exact repetition has given in the same bits: the script does so, as local SGD does.

        A device that computes wrongly twice in the same way cannot be told from it, which the line says.
        """
        self._open = [one for one in self._open if one.place != found.place]
        self._begin(tensors, set(wrong))
        self._agreed = found.step
        if self._session.is_main:
            be = "is" if len(wrong) == 1 else "are"
            self._session.journal.write(
                ReplicaNamed(rank=0, step=found.step, train_call=found.train_call, ranks=())
            )
            self._session.warn(
                f"the exact repetition of step {found.step} gives the same difference between the ranks, so"
                " the script makes it, or a device computes wrongly in the same way each time:"
                f" {counted(len(wrong), 'tensor')}, first {found.name}, {be} compared no longer"
            )

    def _differ(self, found: Difference) -> None:
        """End the attempt."""
        ranks, step = found.ranks, found.step
        who = f"{rank_names(ranks, capitalize=True)} and the others" if ranks else "The ranks"
        since = f"; they were equal after step {found.agreed}" if found.agreed else ""
        self._points.alarm = self._points.alarm or Alarm(
            cause=str(Cause.replicas_differ),
            step=step,
            sentence=(
                f"{who} hold different values of {counted(found.count, 'tensor')} after step {step}, first of"
                f" {found.name}{since}."
            ),
            signature=f"replicas:step{step}",
            advice=ADVICE,
            details=found.model_dump(mode="json"),
        )


def _bits(norm: float | None) -> int:
    """Return the bits of a norm to vote on; 0 for none, and for one that is not finite."""
    return to_bits(norm) if norm is not None and 0 < norm < math.inf else 0


class ReplicasPart(RankFeature):
    """Replicas at the points of a rank."""

    name = ReplicaSettings.NAME

    def call(self, session: Session, points: CallPoints) -> None:
        """Compare after the steps of a call, if ranks hold parameters in common."""
        every = session.config.of(ReplicaSettings).every
        if not every or session.world_size == 1:
            return
        if points.facts is not None and points.facts.layout not in LAYOUTS:
            return
        told = RankReplicas.model_validate(session.settings.features.get(self.name) or {})
        comparison = Comparison(session, points, every, told)
        points.step_ends.append(comparison.end_step)
        points.states.append(comparison)


PART = ReplicasPart()
