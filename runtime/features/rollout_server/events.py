"""The rollout server in the journal: its starts, the weights that it got, the rollouts that it made, and
what is replayed from them. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from grpo_run.runtime.charts import Chart
from grpo_run.runtime.event import Event
from grpo_run.runtime.history.events import AttemptStarted, RunStarted
from grpo_run.runtime.history.history import HistoryPart
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.text import TextEnum, duration_text


class SampleOrigin(TextEnum):
    """Which policy made a rollout, as far as it is proved. The values are metric labels."""

    meant = "meant"
    """The server has proved, before and after the rollout, that it holds the weights that were sent last."""
    stale = "stale"
    """It was made by other weights; the rollout was thrown away and made again."""
    cannot_tell = "cannot_tell"
    """The server has no way to say."""


class ServerStarted(Event, kw_only=True, tag="rollout_server_started"):
    """The run has started its server; it does not answer yet."""

    pid: int
    port: int
    log: str
    host: str = "127.0.0.1"


class ServerReady(Event, kw_only=True, tag="rollout_server_ready"):
    """The server has answered a token. `kept`: it has outlived the ranks of the attempt before."""

    seconds: float
    kept: bool = False


class ServerEnded(Event, kw_only=True, tag="rollout_server_ended"):
    """The server was ended, or has ended by itself."""

    because: str


class ServerUsed(Event, kw_only=True, tag="rollout_server_used"):
    """A trainer generates with a server, which TRL has reached. `started_by_run` is false for one that the
    script names, and `adapters` true if policies go there as adapters, each under a name of its own.
    """

    base_url: str
    started_by_run: bool
    adapters: bool = False


class WeightsSent(Event, kw_only=True, tag="rollout_weights_sent"):
    """The ranks have sent their weights to the server.

    Attributes:
        version: what the server was told to call them; increases with each sending.
        digest: of all tensors, as hexadecimal digits; empty if it was not computed.
        seconds: that it took.
    """

    version: str
    digest: str = ""
    seconds: float


class RolloutMade(Event, kw_only=True, tag="rollout_made"):
    """The server has made the samples of a rollout, and it was checked which policy it has used."""

    samples: int
    origin: str
    because: str = ""


@dataclass(kw_only=True)
class RolloutServer(HistoryPart):
    """The rollout server of a run so far.

    Attributes:
        local_ranks: on this node.
        base_url: of the server that the last attempt has used; empty for none.
        started_by_run: the run has started it.
        used: a trainer of this attempt generates with it.
        adapters: its weights stay, and policies go there as adapters.
        starts: how often the run has started one.
        ready: it has answered, and has not ended since.
        start_seconds: how long its last start took.
        syncs: how often weights were sent, and `sync_seconds` how long that took in all.
        samples: by `SampleOrigin`.
    """

    EVENTS: ClassVar[tuple[type[Event], ...]] = (
        RunStarted, AttemptStarted, ServerStarted, ServerReady, ServerEnded, ServerUsed, WeightsSent,
        RolloutMade,
    )  # fmt: skip
    CHARTS: ClassVar[tuple[Chart, ...]] = (
        Chart(key="weight_sync", group="rollouts", title="Weight sync", unit="seconds",
              metrics=("grpo_weight_syncs_total", "grpo_weight_sync_seconds_total")),
        Chart(key="sample_origin", group="rollouts", title="Samples of the server, by policy", unit="count",
              metrics=("grpo_rollout_samples_total",)),
    )  # fmt: skip

    local_ranks: int = 1
    base_url: str = ""
    started_by_run: bool = False
    used: bool = False
    adapters: bool = False
    starts: int = 0
    ready: bool = False
    start_seconds: float | None = None
    syncs: int = 0
    sync_seconds: float = 0.0
    samples: Counter[str] = field(default_factory=Counter)

    def apply(self, event: Event) -> None:
        """Take one event."""
        match event:
            case RunStarted():
                self.local_ranks = event.world_size_local or 1
                self.base_url, self.started_by_run, self.ready = "", False, False
            case AttemptStarted():
                self.base_url = self.base_url if self.started_by_run else ""
                self.used = False
            case ServerStarted():
                self.starts, self.ready, self.started_by_run = self.starts + 1, False, True
                self.base_url = f"http://{event.host}:{event.port}"
            case ServerReady():
                self.ready = True
                self.start_seconds = self.start_seconds if event.kept else event.seconds
            case ServerEnded():
                self.ready = False
            case ServerUsed():
                self.base_url, self.started_by_run = event.base_url, event.started_by_run
                self.used = True
                self.adapters = event.adapters
            case WeightsSent():
                self.syncs += 1
                self.sync_seconds += event.seconds
            case RolloutMade():
                self.samples[event.origin] += event.samples

    def drawn(self, event: Event) -> Mapping[str, float]:
        """Return the time of a sync, and the origin of samples."""
        match event:
            case WeightsSent():
                return {"weight_sync": event.seconds}
            case RolloutMade():
                return {f"sample_origin/{event.origin.replace('_', ' ')}": event.samples}
        return {}

    def facts(self) -> Mapping[str, str]:
        """Return the server and the origin of the samples."""
        if not self.base_url:
            return {}
        whose = "started by this run" if self.started_by_run else "not started by this run: watched only"
        server = f"{self.base_url} ({whose})"
        if self.starts > 1:
            server += f", started {self.starts} times"
        if self.start_seconds is not None:
            server += f", last start {duration_text(self.start_seconds)}"
        return {"rollout server": server, "samples": self.custody()}

    def beside(self, phases: Collection[Phase]) -> Mapping[str, str]:
        """Return the server, and what it does for the ranks."""
        if not self.base_url:
            return {}
        if self.started_by_run and not self.ready:
            return {"server": Phase.startup.name}
        work = (one.name for one in (Phase.weight_sync, Phase.generate) if one in phases)
        return {"server": next(work, Phase.idle.name)}

    def custody(self) -> str:
        """Return which policy has made the samples of the run; "" before the first."""
        made = sum(self.samples.values())
        if not made:
            return ""
        kept = made - self.samples[SampleOrigin.stale]
        unknown, stale = self.samples[SampleOrigin.cannot_tell], self.samples[SampleOrigin.stale]
        if unknown == kept:
            text = f"{kept:,}; the server cannot tell which policy has made them"
        elif unknown:
            text = f"{kept:,}; for {unknown:,} the server could not tell which policy has made them"
            text += ", the others are from the policy that was meant"
        else:
            text = f"{kept:,}, all from the policy that was meant"
        return text + (f"; {stale:,} of other weights were thrown away and made again" if stale else "")

    def ended(self) -> Sequence[str]:
        """Return a sentence if samples of other weights were found."""
        if not self.samples[SampleOrigin.stale]:
            return ()
        return (f"Samples: {self.custody()}.",)


PART = RolloutServer
