"""What follows a fault of a rollout server, and which faults of ranks it is to blame for."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.journal import event

from grpo_run.runtime.errors import EXIT_STOPPED, ConfigError, ProcessError
from grpo_run.runtime.features.rollout_server._judge import Reading
from grpo_run.runtime.features.rollout_server._process import ServerCommand
from grpo_run.runtime.features.rollout_server.events import PART as HISTORY
from grpo_run.runtime.features.rollout_server.events import ServerUsed
from grpo_run.runtime.features.rollout_server.supervisor import PART, PARTS
from grpo_run.runtime.history.attempt_files import AttemptFiles
from grpo_run.runtime.history.recovery import Action
from grpo_run.runtime.history.reporter import LiveHistory, Reporter
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.supervisor.points import Fault
from grpo_run.watchdog.causes import Cause, Origin
from grpo_run.watchdog.observation import RankState
from grpo_run.watchdog.stalls.step_clock import UNSEEN_SECONDS
from grpo_run.watchdog.verdict import Verdict

LOST = Verdict(
    cause=Cause.exception, culprits=(0,), step=3, phase="generate", origin=Origin.network,
    sentence="Rank 0 raised ConnectionError.", signature="x",
)  # fmt: skip
HUNG = replace(LOST, cause=Cause.generation_stall, origin=Origin.code)


class Health(http.server.BaseHTTPRequestHandler):
    """A server that answers, and says of itself what the test wants."""

    def do_GET(self) -> None:
        well = self.server.well  # type: ignore[attr-defined]
        self.send_response(200 if well is True else well or 503)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "model"}]}).encode())

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def server() -> Iterator[Any]:
    """A server that is well."""
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Health)
    made.well = True  # type: ignore[attr-defined]
    threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


class Scene:
    """A run whose script uses a server that the run has not started."""

    def __init__(self, config: RunConfig, port: int) -> None:
        self.run = RunDirectory(path=Path(config.run_directory))
        self.run.create()
        self.live = LiveHistory(self.run.journal, "run", parts=[HISTORY()])
        reporter = Reporter(self.live, str(self.run.path), lambda text: None)
        self.feature = PART(config, self.run, self.live.history, reporter)
        self.feature.begin_attempt(0)
        url = f"http://127.0.0.1:{port}"
        self.live.write(ServerUsed(rank=0, base_url=url, started_by_run=False))
        self.feature.poll()


@pytest.fixture
def scene(server: Any, tmp_path: Path, make_config: Callable[..., RunConfig]) -> Iterator[Scene]:
    made = Scene(make_config(run_directory=tmp_path / "run"), server.server_port)
    yield made
    made.feature.end()


def test_a_server_is_not_to_blame_for_a_supervisor_that_was_stopped(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has answered meanwhile was not read. A supervisor that looks finds the same fault."""
    watch, now = scene.feature._watch, 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    watch.close()
    assert scene.feature.fault({}) is None
    late = Reading(asked_at=now - 58, refused_since=now, unhealthy_since=now, paused_since=now)
    watch.reading, now = late, now + UNSEEN_SECONDS + 1
    assert scene.feature.fault({}) is None
    watch.reading, now = replace(late, refused_since=now - 9), now + UNSEEN_SECONDS - 1
    assert scene.feature.fault({}).cause is Cause.rollout_server_dead


@pytest.mark.parametrize(
    ("states", "used", "counts"),
    [
        ([RankState.starting], False, True),
        ([RankState.training, RankState.training], True, True),
        ([RankState.training], False, False),
        ([RankState.between, RankState.done], True, False),
        ([RankState.training, RankState.between], True, True),
    ],
)
def test_a_server_that_nobody_uses_may_die(
    states: list[RankState], used: bool, counts: bool, scene: Scene, make_slot: Any
) -> None:
    """No trainer generates with it, or all have trained."""
    if not used:
        scene.live.write(event("attempt_started", attempt=1, world_size=1, node=0))
    watch = scene.feature._watch
    watch.close()
    assert scene.feature.fault({}) is None
    watch.reading = Reading(refused_since=time.monotonic() - 60)
    slots = {rank: make_slot(rank, state=state) for rank, state in enumerate(states)}
    assert (scene.feature.fault(slots) is not None) == counts


@pytest.mark.parametrize("verdict", [LOST, HUNG])
def test_ranks_are_to_blame_while_the_server_answers(verdict: Verdict, scene: Scene) -> None:
    """It answers a token now."""
    assert scene.feature.explain(verdict) is None


def test_other_faults_of_ranks_are_their_own(scene: Scene, server: Any) -> None:
    """Whatever the server does."""
    server.well = False
    assert scene.feature.explain(replace(LOST, origin=Origin.code)) is None
    assert scene.feature.explain(replace(HUNG, phase="reward")) is None


def test_a_server_that_does_not_answer_ranks_is_to_blame(scene: Scene, server: Any) -> None:
    """Its ranks have waited for it beyond their limit."""
    server.well = False
    verdict = scene.feature.explain(HUNG)
    assert verdict is not None
    assert (verdict.cause, verdict.phase, verdict.step) == (Cause.rollout_server_stuck, "generate", 3)
    assert "which this run has not started" in verdict.sentence


def test_a_server_of_others_ends_the_run_so_that_it_can_be_continued(scene: Scene) -> None:
    """Nothing that this run could do would bring it back."""
    verdict = replace(LOST, cause=Cause.rollout_server_dead)
    scene.live.write(event("incident", step=3, train_call=1, cause="rollout_server_dead"))
    answer = scene.feature.answer(Fault(verdict=verdict, failed_ranks=(), files=AttemptFiles(scene.run, 0)))
    assert answer is not None
    assert (answer.decision.action, answer.exit_code, answer.at_once) == (Action.stop, EXIT_STOPPED, True)


@pytest.mark.parametrize("adapters", [True, False])
def test_a_server_is_kept_in_the_middle_of_a_sending_only_if_policies_are_adapters(
    adapters: bool, scene: Scene, server: Any
) -> None:
    """Other weights may be parts of two policies."""
    feature, port = scene.feature, server.server_port
    used = ServerUsed(rank=0, base_url=f"http://127.0.0.1:{port}", started_by_run=True, adapters=adapters)
    scene.live.write(used)
    feature._command = ServerCommand(words=(), environment={}, port=port)
    files = AttemptFiles(scene.run, 0)
    feature.answer(Fault(verdict=replace(HUNG, phase="weight_sync"), failed_ranks=(0,), files=files))
    assert feature._must_restart == ("" if adapters else PARTS)
    feature._syncing = True
    assert feature._why_not_kept() == ("" if adapters else PARTS)


def test_other_faults_are_answered_by_others(scene: Scene) -> None:
    """Also those of ranks that wait for it."""
    files = AttemptFiles(scene.run, 0)
    assert scene.feature.answer(Fault(verdict=HUNG, failed_ranks=(0,), files=files)) is None


def test_a_command_that_becomes_wrong_ends_the_run_in_order(
    tmp_path: Path, make_config: Any, server: Any
) -> None:
    """Before there were ranks, the launch is refused; later, the journal says how the run has ended."""
    run = RunDirectory(path=tmp_path / "run")
    run.create()
    live = LiveHistory(run.journal, "run", parts=[HISTORY()])
    command = {"command": f"env --port {server.server_port}"}
    config = make_config(run_directory=run.path, features={"rollout_server": command})
    feature = PART(config, run, live.history, Reporter(live, str(run.path), lambda text: None))
    with pytest.raises(ConfigError, match="another program listens"):
        feature.begin_attempt(0)
    feature._command = ServerCommand(words=("env",), environment={}, port=server.server_port)
    with pytest.raises(ProcessError, match="another program listens"):
        feature.begin_attempt(0)


def test_a_run_without_a_server_has_nothing_to_say(tmp_path: Path, make_config: Any) -> None:
    """It is neither watched nor told to ranks."""
    run = RunDirectory(path=tmp_path / "run")
    run.create()
    live = LiveHistory(run.journal, "run", parts=[HISTORY()])
    config = make_config(run_directory=run.path)
    feature = PART(config, run, live.history, Reporter(live, str(run.path), lambda text: None))
    feature.begin_attempt(0)
    feature.poll()
    assert feature.fault({}) is None
    assert feature.rank_settings(0, AttemptFiles(run, 0)) is None
    assert feature.explain(LOST) is None
    feature.end()


@pytest.mark.parametrize(
    ("status", "failed"), [(307, False), (401, False), (404, False), (429, False), (500, True)]
)
def test_only_a_server_that_was_well_and_reports_an_error_has_failed(
    status: int, failed: bool, scene: Scene, server: Any
) -> None:
    """Other answers are of a proxy, or of a server without this route."""
    watch = scene.feature._watch
    watch.close()
    server.well = status
    watch.reading = Reading()
    watch.look()
    assert watch.reading.unhealthy_since is None
    watch.reading = Reading(answered_at=1.0)
    watch.look()
    assert (watch.reading.unhealthy_since is not None) == failed
