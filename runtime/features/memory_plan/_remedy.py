"""What a remedy against exhausted memory is: the base class, and what its methods get.

The remedies themselves are in `_remedies.py`. Plain data, and methods that do nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from grpo_run.runtime.memory.facts import MemoryFacts
from grpo_run.runtime.memory.script_settings import OriginalSettings
from grpo_run.watchdog.memory.error_patterns import ErrorSource
from grpo_run.watchdog.memory.shortage import MemoryPhase, Shortage

Plan = Mapping[str, Any]
"""What is changed so that a run needs less memory: by field of a remedy, a value that is not its default.
Values are absolute: they are applied to what the script has set, never to what an earlier plan has made of
it.
"""
ROW_PHASES = frozenset({MemoryPhase.score, MemoryPhase.forward, MemoryPhase.backward})
"""Phases that need less memory if rows are shorter, whatever generates them."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """An out-of-memory error and what is known of the run.

    Attributes:
        shortage: of the verdict.
        facts: of the `train()` call.
        plan: in effect.
        start: where a restart continues, as a clause.
        budget: failures without progress that are recovered; 0 if the user wants no restart.
        proceeds: the attempt has committed so many steps that it did the same work before.
        allow_degrade: the experiment may be changed.
        own_allocator_setting: the environment of the run sets `expandable_segments` itself.
    """

    shortage: Shortage
    facts: MemoryFacts
    plan: Plan
    start: str
    budget: int
    proceeds: bool = False
    allow_degrade: bool = False
    own_allocator_setting: bool = False

    @property
    def phase(self) -> MemoryPhase:
        """The phase that died."""
        return self.shortage.phase

    @property
    def fragmented(self) -> bool:
        """Whether the allocator had reserved what was asked for, in pieces that were too small."""
        figures = self.shortage.figures
        if figures.tried_bytes is None or figures.unallocated_bytes is None:
            return False
        return figures.unallocated_bytes >= figures.tried_bytes

    @property
    def cache_too_small(self) -> bool:
        """Whether vLLM needs a larger share, not less memory in the phase."""
        return self.shortage.source is ErrorSource.vllm_cache

    @property
    def length_matters(self) -> bool:
        """Whether shorter rows need less memory where it ran out."""
        if self.phase is MemoryPhase.generate:
            return not self.facts.generates.startswith("vllm")
        return self.phase in ROW_PHASES


@dataclass(kw_only=True)
class Build:
    """A configuration that a trainer is built with.

    Attributes:
        plan: to apply.
        source: the script's configuration, complete.
        made: its copy, which is changed.
        record: what the script has set.
    """

    plan: Plan
    source: Any
    made: Any
    record: OriginalSettings


class Refused(str):
    """Why a change does not apply, as a clause."""


class Remedy:
    """One change of a memory plan.

    Attributes:
        name: in the journal.
        field: of the plan.
        kind: type of its value, as pydantic takes it.
        default: its value without the change.
        option: its name of `--memory-plan`; empty if the user cannot set it.
        help: what it does, for the option; empty if the name says it.
        words: what it does, where nothing more is to be said.
        phases: in which it helps.
    """

    name: ClassVar[str]
    field: ClassVar[str]
    kind: ClassVar[Any] = bool
    default: ClassVar[Any] = False
    option: ClassVar[str] = ""
    help: ClassVar[str] = ""
    words: ClassVar[str] = ""
    phases: ClassVar[frozenset[MemoryPhase]] = frozenset(MemoryPhase)

    def of(self, plan: Plan) -> Any:
        """Return the value of its field in a plan."""
        return plan.get(self.field, self.default)

    def is_tried(self, situation: Situation) -> bool:
        """Whether it is for this error at all."""
        return situation.phase in self.phases and not situation.cache_too_small

    def comes_first(self, situation: Situation) -> bool:
        """Whether it comes before all others."""
        return False

    def next(self, situation: Situation) -> Any:
        """Return the next value of its field, `Refused`, or None if it does not concern the run."""
        raise NotImplementedError

    def said(self, before: Plan, after: Plan, facts: MemoryFacts) -> str:
        """Return what differs between two plans in the terms of the script's settings."""
        return self.words

    def differences(self, facts: MemoryFacts) -> tuple[str, ...]:
        """Return why the update is not the same after the change; empty if it is, up to the rounding of
        sums.
        """
        return ()

    def environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return variables of the ranks.

        Args:
            environment: the rank's, without them.
        """
        return {}

    def apply(self, build: Build) -> None:
        """Change the configuration that a trainer is built with."""

    def check(self, plan: Plan, trainer: Any, record: OriginalSettings) -> str | None:
        """Check at `train()` that the change is still in effect; return a warning if it is in part.

        Raises:
            ConfigError: it is not, for example because the script has set the value again.
        """
        return None
