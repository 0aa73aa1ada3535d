"""What the user could change so that a healthy run takes less time: ranks that wait for one another.

Called by the supervisor at each poll, and after each committed step. The advice is given once in a run, on
the terminal and in the journal; status and reports repeat it. It is no fault and changes nothing. Pure: it is
given what was read, and the time.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from statistics import median

from grpo_run.runtime.memory.facts import MemoryFacts
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.awaited import SHORTEST_WAIT_SECONDS, AwaitedRank
from grpo_run.watchdog.text import duration_text, rank_names

SUBJECT = "balance"
UNEVEN = 0.3
"""Share of the time that ranks wait for another one, from which it is told: of the last steps together, and
of each that counts."""
LAST_STEPS, UNEVEN_STEPS = 50, 8
"""Steps that are looked at, and how many of them must count: compilation, or a pause, makes fewer of them
long. In one that counts ranks wait for `SHORTEST_WAIT_SECONDS` at least: a busy machine makes short ones
uneven."""
LONGEST_POLL_SECONDS = 2.0
"""More time between two polls was not observed."""
SAME_RANK = 0.8
"""Share of the waits that are for the same rank, from which only this one is named."""
_BY_LENGTH = (
    "shuffle the data set, sort or bucket it by length, or cap the completions (max_completion_length,"
    " `--generation`)"
)
REMEDIES = {
    Phase.generate: _BY_LENGTH,
    Phase.score: _BY_LENGTH,
    Phase.forward_backward: _BY_LENGTH,
    Phase.reward: "let the function score its completions at the same time, or bound it (`--reward-timeout`)",
}
"""Phases whose work the lengths of samples decide. In the others one rank may work for all by design."""


class Waits:
    """How long the ranks of one attempt have waited for one another in its last steps.

    Waits in C++ or on a device are seen from `SHORTEST_WAIT_SECONDS` on.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, Mapping[tuple[int, Phase], float]]] = deque(maxlen=LAST_STEPS)
        """Of each step its seconds, and what the others waited on average, by the rank and its phase."""
        self._waited: defaultdict[tuple[int, Phase], float] = defaultdict(float)
        self._logged = self._was_awaited = False
        self._polled_at = 0.0
        self._committed_at: float | None = None
        self.expected: Collection[Phase] = ()
        """Phases in which one rank works for all."""

    def polled(
        self,
        phases: Mapping[int, Phase | None],
        waiting: Collection[int],
        awaited: AwaitedRank | None,
        now: float,
    ) -> None:
        """See whether ranks wait.

        Args:
            phases: of all ranks.
            waiting: those that wait in a collective, by their logs.
            awaited: who is waited for, as of the last check, if the logs do not show it.
            now: monotonic seconds.
        """
        seconds, self._polled_at = min(now - self._polled_at, LONGEST_POLL_SECONDS), now
        late = [(rank, phase) for rank, phase in phases.items() if rank not in waiting]
        # what the logs have shown has ended when they do not show it any more
        self._logged = bool(waiting) or (self._logged and awaited is not None)
        if not self._logged and awaited is not None:
            waiting, late = awaited.waiters, [(awaited.rank, awaited.phase)]
            if not self._was_awaited:
                seconds += SHORTEST_WAIT_SECONDS  # it is seen only after that
        self._was_awaited = awaited is not None
        for rank, phase in late if waiting else ():
            if phase in REMEDIES and phase not in self.expected:
                self._waited[rank, phase] += seconds * len(waiting) / (len(phases) - 1) / len(late)

    def committed(self, now: float) -> None:
        """A step has ended. The first one of an attempt does not count: it includes compilation."""
        if self._committed_at is not None:
            self._steps.append((now - self._committed_at, self._waited))
        self._committed_at, self._waited = now, defaultdict(float)

    @property
    def sentence(self) -> str | None:
        """What is told if ranks wait for long; None if they do not."""
        uneven = [
            waits
            for seconds, waits in self._steps
            if sum(waits.values()) >= max(SHORTEST_WAIT_SECONDS, UNEVEN * seconds)
        ]
        total = sum(seconds for seconds, _ in self._steps)
        waited: defaultdict[int, float] = defaultdict(float)
        phases: defaultdict[Phase, float] = defaultdict(float)
        for (rank, phase), seconds in (item for _, waits in self._steps for item in waits.items()):
            waited[rank] += seconds
            phases[phase] += seconds
        lost = sum(waited.values())
        if len(uneven) < UNEVEN_STEPS or lost < UNEVEN * total:
            return None
        longest, phase = max(waited, key=waited.__getitem__), max(phases, key=phases.__getitem__)
        usual = duration_text(median(sum(waits.values()) for waits in uneven))
        share = f"{min(1.0, lost / total):.0%} of their time"
        of = f"{usual} in {len(uneven)} of the last {len(self._steps)} steps, {share}"
        if waited[longest] >= SAME_RANK * lost:
            who, other = f"the others wait for rank {longest}", ", or find out why this rank is slower"
        else:
            who, other = f"they wait now for one and now for another of {rank_names(waited)}", ""
        change = f"To change that, {REMEDIES[phase]}{other}"
        return f"ranks wait for one another in {phase.name}, {of}: {who}. {change}"


class Advice:
    """What was observed in one launch.

    Args:
        facts: returns the facts of the `train()` call; None if there are none.
        said: the subjects of what was said in this run.
        say: shows a sentence on a subject and appends it to the journal, which adds to `said`.
    """

    def __init__(
        self, facts: Callable[[], MemoryFacts | None], said: Collection[str], say: Callable[[str, str], None]
    ) -> None:
        self._facts = facts
        self._said = said
        self._say = say
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Ranks begin anew."""
        self._is_known = False
        self.waits = Waits() if SUBJECT not in self._said else None
        """Is told at each poll who waits; None once that was said."""

    def committed(self, now: float) -> None:
        """A step has been committed. `now` is in monotonic seconds."""
        if self.waits is None:
            return
        if not self._is_known:
            self._is_known, facts = True, self._facts()
            if facts is not None and facts.generates == "vllm_server":
                self.waits.expected = (Phase.generate,)
        self.waits.committed(now)
        if (sentence := self.waits.sentence) is not None:
            self._say(SUBJECT, sentence)
            self.waits = None
