"""A rollout server that dies or stands still at some point of a run: it is named, started again, and the run
ends in the weights of an undisturbed one. Healthy servers that are slow are left alone.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import references
from support.rollout_server.plants import VARIABLE
from support.rollout_server.starting import SCRIPT, command, stand_in
from support.runs import Run, Runs, alive, digest

from grpo_run.watchdog.observation import Phase

STEPS = 5
WORDS = (str(SCRIPT), "--max-steps", str(STEPS), "--save-steps", str(STEPS), "--output-dir", "out")
DEAD_SECONDS, PROVED_SECONDS = 2.0, 15.0


class Served(Run):
    """Two ranks with a server of their own."""

    @property
    def server(self) -> dict[str, Any]:
        """Its last start."""
        return self.events("rollout_server_started")[-1]

    def ask(self, route: str, body: Any = None) -> None:
        """Send the server a request; POST."""
        url = f"http://127.0.0.1:{self.server['port']}{route}"
        urllib.request.urlopen(url, json.dumps(body or {}).encode(), timeout=30).close()

    def check(self, *causes: str, limit_seconds: float) -> None:
        """It ended well, with these faults, each seen in time, and in the weights of an undisturbed run. All
        samples that were trained on are of the policy that was meant.
        """
        self.ended()
        incidents = self.events("incident")
        assert [one["cause"] for one in incidents] == list(causes), self.tail()
        assert all(one["detection_seconds"] <= limit_seconds for one in incidents), incidents
        assert {one["origin"] for one in self.events("rollout_made")} == {"meant"}
        assert not alive([one["pid"] for one in self.events("rollout_server_started")])
        assert self.digest == undisturbed(self)

    @property
    def digest(self) -> str:
        """Of the final weights."""
        return digest(self.cwd / "out")


def words_of(folder: Path) -> list[str]:
    """The command of a server whose model lies in a folder; the run gives it a port."""
    words = command(folder, 0)
    del words[words.index("--host") :]
    return words


def undisturbed(run: Served) -> str:
    """Return the digest of a run without a fault, which is run once per session."""
    folder = references.cache / "rollout-server"
    folder.mkdir(exist_ok=True)
    with open(f"{folder}.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "out" / "weights.sha256").exists():
            server = shlex.join(words_of(folder))
            plain = Served(folder, ["--nproc-per-node", "2", "--rollout-server", server, *WORDS])
            plain.start().ended()
            assert plain.events("incident") == []
    return digest(folder / "out")


@pytest.fixture
def served(runs: Runs, tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Return a function that starts such a run, in whose server something is planted."""
    made: list[Served] = []

    def start(*options: str, **plants: Any) -> Served:
        if "fault" in plants:
            plants["mark"] = str(tmp_path / "fault.mark")
        server = shlex.join(words_of(tmp_path))
        run = Served(
            tmp_path, ["--nproc-per-node", "2", "--rollout-server", server, *options, *WORDS],
            environment={VARIABLE: json.dumps(plants)},
        )  # fmt: skip
        made.append(run)
        run.start()
        return run

    yield start
    for run in made:
        run.close()


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("kill engine at generation 3", id="generating", marks=pytest.mark.full),
        pytest.param("kill server at generation 3", id="generating, both processes", marks=pytest.mark.full),
        pytest.param("kill server at start 3", id="before a sync", marks=pytest.mark.full),
        pytest.param("kill engine at update 3", id="in a sync"),
        pytest.param("kill server at update 3", id="in a sync, both processes", marks=pytest.mark.full),
        pytest.param("kill server at finish 3", id="at the end of a sync", marks=pytest.mark.full),
        pytest.param("kill server at reset 3", id="after a sync", marks=pytest.mark.full),
    ],
)
def test_a_killed_server_is_started_again(fault: str, served: Callable[..., Served]) -> None:
    """Wherever it is killed, while ranks wait for it or not."""
    run = served(fault=fault)
    run.check("rollout_server_dead", limit_seconds=DEAD_SECONDS)
    assert len(run.events("rollout_server_started")) == 2


@pytest.mark.full
def test_a_server_that_is_killed_while_it_starts_is_started_again(served: Callable[..., Served]) -> None:
    """No rank has run yet, so it is no fault of the run."""
    run = served(fault="kill server at startup 1")
    run.check(limit_seconds=DEAD_SECONDS)
    assert len(run.events("rollout_server_started")) == 2


@pytest.mark.full
def test_a_server_is_killed_while_nobody_needs_it_and_again_with_a_rank(
    served: Callable[..., Served],
) -> None:
    """A server that dies is named although a rank dies with it."""
    run = served()
    with run.held(after=2) as let:
        run.until_step(2)
        os.killpg(run.server["pid"], signal.SIGKILL)
        run.until_event("incident")
        let(1)
        run.until_event("attempt_started", count=2)
        run.until_step(3)
        os.killpg(run.server["pid"], signal.SIGKILL)
        run.kill(1)
        run.until_event("incident", count=2)
    run.check("rollout_server_dead", "rollout_server_dead", limit_seconds=DEAD_SECONDS)


def test_a_killed_rank_leaves_a_server_that_is_kept(served: Callable[..., Served]) -> None:
    """It is put in order, answers the ranks of the next attempt, and they send it their weights first."""
    run = served()
    with run.held(after=2):
        run.until_step(2)
        run.until_phase(0, Phase.reward)  # no weights are being sent
        run.ask("/pause?mode=keep")
        run.kill(1)
        run.until_event("incident")
    run.check("signal", limit_seconds=DEAD_SECONDS)
    assert len(run.events("rollout_server_started")) == 1
    assert [one["kept"] for one in run.events("rollout_server_ready")] == [False, True]


@pytest.mark.parametrize(
    "process", [pytest.param("engine", id="engine"), pytest.param("server", id="all", marks=pytest.mark.full)]
)
def test_a_stopped_server_is_stuck(process: str, served: Callable[..., Served]) -> None:
    """Its health check succeeds as long as its first process runs."""
    run = served(fault=f"stop {process} at generation 3")
    run.check("rollout_server_stuck", limit_seconds=PROVED_SECONDS)


@pytest.mark.full
def test_a_paused_server_is_stuck(served: Callable[..., Served]) -> None:
    """Nobody sends weights, so nobody will resume it."""
    run = served(completion_seconds=1.0)
    run.until_step(2)
    run.ask("/pause?mode=keep")
    run.check("rollout_server_stuck", limit_seconds=PROVED_SECONDS)


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("hang engine at generation 3", "rollout_server_stuck"),
        ("hang engine at update 3", "weight_sync_stuck"),
    ],
)
def test_a_server_that_never_answers_is_found_by_learned_limits(
    fault: str, cause: str, served: Callable[..., Served]
) -> None:
    """Nothing proves it: it may be slow."""
    run = served("--deadline-floor", "10", "--deadline-first", "20", fault=fault)
    run.check(cause, limit_seconds=100)


@pytest.mark.full
def test_the_server_ends_with_a_killed_supervisor(served: Callable[..., Served]) -> None:
    """The guardian ends it, and the next launch starts its own."""
    run = served()
    with run.held(after=2):
        run.until_step(2)
        server = psutil.Process(run.server["pid"])
        tree = [server, *server.children(recursive=True)]
        run.process.kill()
        run.wait()
        _, left = psutil.wait_procs(tree, timeout=20)
        assert left == []
    run.start()
    run.check(limit_seconds=DEAD_SECONDS)


@pytest.mark.full
def test_a_server_of_others_that_dies_ends_the_run_to_be_continued(runs: Runs, tmp_path: Path) -> None:
    """The run has not started it, so it is not restarted; the same command continues."""
    with stand_in(tmp_path) as server:
        run = runs("--nproc-per-node", "2", *WORDS, environment=server.environment())
        with run.held(after=2):
            run.start().until_step(2)
            server.close()
            run.ended(75)
    incident = run.until_event("incident")
    assert incident["cause"] == "rollout_server_dead"
    assert f"{server.url}, which this run has not started, does not listen any more" in run.printed()
    with stand_in(tmp_path, port=server.port):
        run.start().ended()


def test_a_stop_ends_the_wait_for_a_server(served: Callable[..., Served]) -> None:
    """No rank runs yet, and nothing is left."""
    run = served(startup_seconds=60.0)
    started = run.until_event("rollout_server_started")
    run.send_signal(signal.SIGTERM)
    run.ended(75)
    assert not alive([started["pid"]])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("no-such-program serve", "no-such-program is not a program that can be found on PATH"),
        (
            "python -c 'raise SystemExit(3)'",
            "has exited with exit code 3 before it answered; it has said nothing",
        ),
        (
            "python -c 'print(\"why\")'",
            "has exited with exit code 0 before it answered; it has said\n    why\n",
        ),
    ],
)
def test_a_server_that_cannot_start_is_one_line(words: str, said: str, runs: Runs, tmp_path: Path) -> None:
    """With exit code 2, and no run directory."""
    run = runs("--nproc-per-node", "1", "--rollout-server", words, *WORDS).start()
    run.ended(2)
    assert said in run.printed()
    assert not run.directory.exists()


NOT_FOUND = """
import http.server, sys
handler = http.server.SimpleHTTPRequestHandler
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), handler).serve_forever()
"""


@pytest.mark.full
def test_a_server_that_does_not_answer_in_time_says_how_far_it_came(runs: Runs) -> None:
    """Its log is kept, with the run directory."""
    server = shlex.join(("python", "-c", NOT_FOUND))
    words = ("--rollout-server", server, "--rollout-server-start-timeout", "2", *WORDS)
    run = runs("--nproc-per-node", "1", *words).start().ended(93)
    assert "start-timeout 2; at last: /health answers 404); its log is" in run.printed()
    assert (run.directory / "rollout-server.log").exists()


HEALTHY: dict[str, dict[str, Any]] = {
    **{f"first request {n}": {"first_completion_seconds": 40.0} for n in range(8)},
    **{f"sync {n}": {"sync_seconds": 20.0} for n in range(6)},
    **{f"long prompts {n}": {"completion_seconds": 8.0} for n in range(8)},
    **{f"start {n}": {"startup_seconds": 25.0} for n in range(4)},
    **{f"everything {n}": {"completion_seconds": 4.0, "sync_seconds": 8.0} for n in range(4)},
}


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", HEALTHY)
def test_a_slow_server_is_left_alone(name: str, served: Callable[..., Served]) -> None:
    """First requests, syncs and prompts take long, as with large models."""
    run = served(**HEALTHY[name])
    run.check(limit_seconds=0.0)
    assert len(run.events("rollout_server_started")) == 1


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_server_that_is_busy_with_others_is_left_alone(served: Callable[..., Served]) -> None:
    """A rank waits in its queue, and is answered in the end."""
    run = served(completion_seconds=3.0)
    with run.held(after=2):
        run.until_step(2)
        run.until_phase(0, Phase.generate)
    run.check(limit_seconds=0.0)
