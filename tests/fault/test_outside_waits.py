"""A rank that waits for a server outside the job, in the first call of a reward function."""

from __future__ import annotations

import contextlib
import http.server
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.runs import WITH_SCRIPTS, Runs, before_training


class SlowServer(http.server.ThreadingHTTPServer):
    """A server outside the job that answers `GET /<seconds>` after so many seconds."""

    daemon_threads = True

    class Answer(http.server.BaseHTTPRequestHandler):
        """Waits, then answers."""

        def do_GET(self) -> None:
            time.sleep(float(self.path[1:]))
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):  # the client has gone
                self.wfile.write(b"done")

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), self.Answer)


@contextlib.contextmanager
def slow_server() -> Iterator[str]:
    """Serve for the length of the block; gives host and port."""
    with SlowServer() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


JUDGE = """
    import http.client
    from pathlib import Path

    def fast(completions, **kwargs):
        return [0.5] * len(completions)

    def judge(completions, **kwargs):
        asked = Path(f"asked{trainer.args.process_index}")
        if trainer.args.process_index in RANKS and not asked.exists():
            asked.touch()
            connection = http.client.HTTPConnection(ADDRESS)
            connection.request("GET", "/SECONDS")
            connection.getresponse().read()
        return [0.5] * len(completions)

    trainer = tiny.rollout_trainer(arguments, reward_funcs=[FUNCTIONS])
"""


@pytest.mark.parametrize(
    ("functions", "ranks", "seconds", "limit"),
    [("fast, judge", (1,), 20, None), ("judge", (0, 1), 600, 8)],
    ids=["nothing is known", "the user's limit"],
)
def test_a_first_wait_for_a_silent_server_outlives_learned_limits_and_not_the_users(
    runs: Runs, tmp_path: Path, functions: str, ranks: tuple[int, ...], seconds: int, limit: int | None
) -> None:
    """Five floors, 15 s, are the limit of a wait that is known; no byte comes for longer.

    The address is named on the terminal, once. The user's limit for first occurrences holds as given.
    """
    with slow_server() as address:
        body = JUDGE.replace("ADDRESS", repr(address)).replace("SECONDS", str(seconds))
        body = body.replace("RANKS", repr(ranks))
        before_training(tmp_path / "judged.py", body.replace("FUNCTIONS", functions))
        given = ("--deadline-first", str(limit)) if limit else ()
        run = runs(
            "--deadline-floor", "3", *given, "--nproc-per-node", "2", "judged.py", "--output-dir", "out",
            "--max-steps", "3", "--save-steps", "2", environment=WITH_SCRIPTS,
        ).start()  # fmt: skip
        if limit is None:
            run.until_event("warning")
            status = run.status()
            assert status["waiting"]["outside"] == address
            assert f"connected to {address}" in status["sentence"]
        run.ended()
    told = re.findall(rf"rank 1 has waited \d+ s for {address} in reward; .* after 1800 s", run.printed())
    if limit is None:
        assert (run.events("incident"), len(told)) == ([], 1), run.tail()
        assert run.status()["attempts"] == 1
        return
    (verdict,) = run.verdicts()
    assert (verdict["cause"], sorted(verdict["culprits"])) == ("reward_stall", [0, 1])
    assert verdict["location"]["function"] == "judge"
    assert "(deadline 8.0 s" in verdict["sentence"]
