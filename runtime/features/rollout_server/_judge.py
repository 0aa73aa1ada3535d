"""What the observations of a rollout server prove: it is dead, it is stuck, or neither.

    dead    its process has exited, its engine has, nothing listens at its port any more, or its own health
            check says so
    stuck   one of its processes is stopped by a signal; it is paused although nobody sends weights; or it has
            not answered one token for longer than it ever needed, without any sign of work

A server that is slow is not stuck: it may compile, read a long prompt, or serve other clients. Where nothing
proves a fault, the limits of the ranks' phases count (`watchdog/stalls/deadlines.py`). Called by
`supervisor.py`. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.text import duration_text

CONFIRM_SECONDS = 1.0
"""A port that refuses connections, an engine that has gone and a health check that fails are seen for this
long before they count. A server that ends does so within milliseconds."""
FOREIGN_SECONDS = 5.0
"""The same for a server that the run has not started: it may be restarted by others, or be behind a proxy."""
STOPPED_SECONDS = 3.0
"""A debugger stops a process for moments."""
PAUSED_SECONDS = 5.0
"""A trainer that has sent weights resumes the server within moments."""
UNUSED_SECONDS = 60.0
"""For both, while no rank is seen to need the server: it holds up nobody. Ranks may need it unseen, in
requests of the script or in a process of rollouts."""
LEAST_ANSWER_SECONDS = 60.0
"""The least time in which one token has to come. The first answer may compile for most of a minute."""
FACTOR_LONGEST = 10.0
"""Multiple of the longest answer so far."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a server was last seen. Times are seconds of this machine's monotonic clock; None for never.

    Attributes:
        answered_at: when its health check last succeeded.
        refused_since: nothing has listened at its port since then.
        unhealthy_since: its health check has said that it has failed since then.
        paused_since: it has said that it is paused since then.
        worked_at: when its own counters of tokens last rose.
        counts_tokens: it has such counters. Without, a busy server looks like one that stands still.
        asked_at: when it was asked for a token that has not come yet.
        longest_answer_seconds: for one token, so far.
    """

    answered_at: float | None = None
    refused_since: float | None = None
    unhealthy_since: float | None = None
    paused_since: float | None = None
    worked_at: float | None = None
    counts_tokens: bool = False
    asked_at: float | None = None
    longest_answer_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Processes:
    """The processes of a server that the run has started.

    Attributes:
        exit_code: of the first one, negative for a signal; None while it lives.
        stopped: name and pid of one that is stopped, and since when; None if none is.
        gone: name and pid of an engine that has exited while the server lives, and since when.
    """

    exit_code: int | None = None
    stopped: tuple[str, float] | None = None
    gone: tuple[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A fault of the server: its cause, the end of a sentence that begins with the server, and since when it
    holds up the ranks, as far as that was seen.
    """

    cause: Cause
    what: str
    since: float
    confidence: str = "proved"


def judge(
    reading: Reading, processes: Processes | None, *, syncing: bool, now: float, needed_since: float | None
) -> Finding | None:
    """Return the fault of a server that has answered before; None if it has none, or that is not certain.

    Args:
        reading: as it was last seen.
        processes: None for a server that the run has not started.
        syncing: a rank sends weights.
        now: monotonic seconds.
        needed_since: a rank sends weights or waits for tokens since then; None if none is seen to.
    """

    def still_since(since: float | None, least_seconds: float) -> float | None:
        """Since when it has held up somebody; None if that is no fault yet."""
        if since is not None and needed_since is not None and now - max(since, needed_since) >= least_seconds:
            return max(since, needed_since)
        return None

    if processes is not None:
        if processes.exit_code is not None:
            engine, since = "", now
            if processes.gone is not None:
                since = processes.gone[1]
                engine = f", {'after' if processes.gone[1] < now else 'with'} its engine {processes.gone[0]}"
            return _dead(f"has exited {ended_with(processes.exit_code)}{engine}", since)
        if processes.gone is not None and now - processes.gone[1] >= CONFIRM_SECONDS:
            return _dead(f"has lost its engine: {processes.gone[0]} has exited", processes.gone[1])
    confirm_seconds = CONFIRM_SECONDS if processes is not None else FOREIGN_SECONDS
    if reading.refused_since is not None and now - reading.refused_since >= confirm_seconds:
        return _dead("does not listen any more: connections are refused", reading.refused_since)
    if reading.unhealthy_since is not None and now - reading.unhealthy_since >= confirm_seconds:
        text = "says that its engine has failed: its health check does not succeed"
        return _dead(text, reading.unhealthy_since)
    if processes is not None and processes.stopped is not None:
        name, stopped_at = processes.stopped
        unused = stopped_at if now - stopped_at >= UNUSED_SECONDS else None
        if (held_up := still_since(stopped_at, STOPPED_SECONDS) or unused) is not None:
            return _stuck(syncing, f"is stopped: {name} was stopped by a signal", held_up)
    if not syncing and (held_up := still_since(reading.paused_since, PAUSED_SECONDS)) is not None:
        text = "is paused although nobody sends weights, and answers no request"
        return _stuck(syncing, text, held_up)
    waited_seconds = min(_for(reading.asked_at, now), _for(reading.worked_at, now, never=float("inf")))
    limit_seconds = max(LEAST_ANSWER_SECONDS, FACTOR_LONGEST * reading.longest_answer_seconds)
    if not syncing and reading.counts_tokens and waited_seconds >= limit_seconds:
        usual = duration_text(reading.longest_answer_seconds)
        waited = duration_text(waited_seconds)
        return Finding(
            cause=Cause.rollout_server_stuck,
            what=f"has not answered one token for {waited}, where it took at most {usual} before",
            since=now - waited_seconds,
            confidence="deadline",
        )
    return None


def _dead(what: str, since: float) -> Finding:
    return Finding(cause=Cause.rollout_server_dead, what=what, since=since)


def _stuck(syncing: bool, what: str, since: float) -> Finding:
    cause = Cause.weight_sync_stuck if syncing else Cause.rollout_server_stuck
    return Finding(cause=cause, what=what, since=since)


def _for(since: float | None, now: float, never: float = 0.0) -> float:
    """How long something has been so; `never` if it is not."""
    return never if since is None else now - since


def ended_with(exit_code: int) -> str:
    """Return how a process has ended, as the end of a sentence. A negative code is a signal."""
    return f"by signal {-exit_code}" if exit_code < 0 else f"with exit code {exit_code}"
