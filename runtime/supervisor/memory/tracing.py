"""Trace a run with several memory plans, in a separate process, after an out-of-memory error.

    facts, plans → request → process (`grpo_run.runtime.planning`) → peaks by plan

The process is forked from the warm interpreter, has a deadline, a lower priority, a bound of its memory and
no GPU. Called by the fallback steps (`runtime/supervisor/run_memory.py`) while the ranks of the failed
attempt wait; of what is not traced in time, the first change is made. Traces nothing while a run proceeds.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from grpo_run.runtime.errors import ProcessError
from grpo_run.runtime.memory.facts import MemoryFacts
from grpo_run.runtime.memory.files import (
    TRACE_FOLDER,
    VARIABLE,
    TraceReply,
    TraceRequest,
    output_file,
    read_replies,
    write_request,
)
from grpo_run.runtime.memory.plan import MemoryPlan
from grpo_run.runtime.processes.ranks import RankGroup, RankSpec
from grpo_run.runtime.supervisor.memory._prediction import Traces
from grpo_run.watchdog.memory.shortage import MemoryPhase

TRACE_SECONDS = 20.0
"""How long a recovery waits for traces. Two plans of a model of 7 B parameters take 5 s on two idle cores."""
POLL_SECONDS = 0.1
ENTRY = "grpo_run.runtime.planning.plan_worker:main"
"""The process: `module:function`. This package does not import trainers, which import torch."""


class JobTracer:
    """Traces of one run. Remembers the plans that it has traced.

    Args:
        run_directory: of the run.
        preloaded: fork the process from the warm interpreter.
        interrupted: whether something is waiting that is more important than a trace, such as a stop.
        seconds: how long traces may take after one error.
        entry: of the process.
    """

    def __init__(
        self,
        run_directory: Path,
        *,
        preloaded: bool,
        interrupted: Callable[[], bool] = lambda: False,
        seconds: float = TRACE_SECONDS,
        entry: str = ENTRY,
    ) -> None:
        self._folder = run_directory / TRACE_FOLDER
        self._entry = entry
        self._preloaded = preloaded
        self._interrupted = interrupted
        self._seconds = seconds
        self._of: MemoryFacts | None = None
        self._known: dict[MemoryPlan, Mapping[str, float]] = {}

    def trace(self, facts: MemoryFacts, phase: MemoryPhase, plans: Sequence[MemoryPlan]) -> Traces:
        """Trace plans in their order, until one needs less in a phase than the first.

        Args:
            facts: of the `train()` call.
            phase: that died.
            plans: the first is the one in effect.
        """
        name = str(phase)
        if facts != self._of:
            self._of, self._known = facts, {}
        missing = self._run(facts, name, plans)
        traced = {plan: peaks for plan, peaks in self._known.items() if plan in plans and name in peaks}
        if not missing and plans[0] not in traced:
            missing = f"a trace of this job has no {name}"
        return Traces(peaks=traced, missing=missing)

    def _run(self, facts: MemoryFacts, phase: str, plans: Sequence[MemoryPlan]) -> str:
        """Trace what is not known; return why something is missing, as a clause."""
        unknown = tuple(plan for plan in plans if plan not in self._known)
        if not unknown:
            return ""
        first = self._known.get(plans[0], {}).get(phase)
        request = TraceRequest(facts=facts, plans=unknown, phase=phase, below_bytes=first)
        try:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(mode=0o700)
            write_request(self._folder, request)
            ended = self._wait()
        except (OSError, ProcessError) as error:
            return f"no process could be started: {error}"
        replies = read_replies(self._folder)
        self._known |= {reply.plan: reply.peaks for reply in replies if reply.plan is not None}
        return _refusal(replies) or ended

    def _wait(self) -> str:
        """Run the process to its end or its deadline; return why it has not ended by itself, as a clause."""
        environment = {**os.environ, VARIABLE: str(self._folder), "CUDA_VISIBLE_DEVICES": ""}
        spec = RankSpec(
            rank=0, environment=environment, directory=str(self._folder), log=output_file(self._folder)
        )
        deadline = time.monotonic() + self._seconds
        process = RankGroup([spec], entry=self._entry, preloaded=self._preloaded)
        try:
            while time.monotonic() < deadline and not self._interrupted():
                if exits := process.wait(POLL_SECONDS):
                    failed = exits[0].exit_code != 0
                    return f"the process failed, see {output_file(self._folder)}" if failed else ""
            return (
                f"it took more than {self._seconds:g} s" if not self._interrupted() else "the run is stopped"
            )
        finally:
            process.kill()
            process.release()


def _refusal(replies: Sequence[TraceReply]) -> str:
    return next((reply.refusal for reply in replies if reply.refusal), "")
