"""What is replayed of a rollout server, and the sentence on the samples."""

from __future__ import annotations

import pytest

from grpo_run.runtime.features.rollout_server.events import (
    RolloutMade,
    RolloutServer,
    SampleOrigin,
    ServerEnded,
    ServerReady,
    ServerStarted,
    ServerUsed,
    WeightsSent,
)
from grpo_run.runtime.history.events import AttemptStarted
from grpo_run.watchdog.observation import Phase


def replayed(*samples: tuple[SampleOrigin, int]) -> RolloutServer:
    """A run whose server has made these samples."""
    server = RolloutServer()
    server.apply(ServerStarted(pid=7, port=8123, log="log"))
    server.apply(ServerReady(seconds=2.0))
    for origin, count in samples:
        server.apply(RolloutMade(samples=count, origin=str(origin)))
    return server


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([], ""),
        ([(SampleOrigin.meant, 12_800)], "12,800, all from the policy that was meant"),
        ([(SampleOrigin.cannot_tell, 8)], "8; the server cannot tell which policy has made them"),
        (
            [(SampleOrigin.meant, 8), (SampleOrigin.stale, 8), (SampleOrigin.meant, 8)],
            "16, all from the policy that was meant; 8 of other weights were thrown away and made again",
        ),
        (
            [(SampleOrigin.meant, 8), (SampleOrigin.cannot_tell, 4)],
            ("12; for 4 the server could not tell which policy has made them, the others are from the"
            " policy that was meant"),
        ),
    ],
)  # fmt: skip
def test_the_samples_have_one_sentence(samples: list[tuple[SampleOrigin, int]], said: str) -> None:
    """Samples that were thrown away are no samples of the run."""
    assert replayed(*samples).custody() == said


def test_stale_samples_are_told_at_the_end() -> None:
    """Others are not worth a sentence."""
    assert replayed((SampleOrigin.meant, 8)).ended() == ()
    assert "8 of other weights" in replayed((SampleOrigin.meant, 8), (SampleOrigin.stale, 8)).ended()[0]


def test_a_server_is_up_from_its_answer_to_its_end() -> None:
    """One that is kept does not start again."""
    server = replayed()
    assert (server.ready, server.starts, server.start_seconds) == (True, 1, 2.0)
    server.apply(AttemptStarted())
    server.apply(ServerReady(seconds=0.1, kept=True))
    assert (server.ready, server.starts, server.start_seconds) == (True, 1, 2.0)
    server.apply(ServerEnded(because="is dead"))
    assert not server.ready
    assert "http://127.0.0.1:8123 (started by this run), last start 2 s" in server.facts().values()


def test_a_server_of_others_is_forgotten_with_its_attempt() -> None:
    """The next attempt may use none."""
    server = RolloutServer()
    server.apply(ServerUsed(base_url="http://other:8000", started_by_run=False))
    assert "watched only" in server.facts()["rollout server"]
    server.apply(AttemptStarted())
    assert server.facts() == {}


def test_syncs_are_counted() -> None:
    """With the longest one."""
    server = replayed()
    for seconds in (0.5, 2.0, 1.0):
        server.apply(WeightsSent(version="v", seconds=seconds))
    assert (server.syncs, server.sync_seconds) == (3, 3.5)


@pytest.mark.parametrize(
    ("phases", "shown"),
    [
        ({Phase.generate, Phase.data}, "generate"),
        ({Phase.weight_sync, Phase.generate}, "weight_sync"),
        ({Phase.optimizer}, "idle"),
    ],
)
def test_the_lane_of_the_server_shows_what_it_does_for_ranks(phases: set[Phase], shown: str) -> None:
    """Until it answers, it starts."""
    server = replayed()
    assert server.beside(phases) == {"server": shown}
    server.apply(ServerEnded(because="is dead"))
    assert server.beside(phases) == {"server": "startup"}
    assert RolloutServer().beside(phases) == {}
