"""Runs that send messages and heartbeats to a local server, also to one that refuses or never answers."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

from support.runs import SCRIPTS, Run, Runs
from support.web_hooks import SECRET, receiver
from support.whole_runs import PATCHED

LOCAL = {"no_proxy": "*"}
GRPO = (
    "--snapshot-every", "1", str(SCRIPTS / "grpo.py"), "--output-dir", "out", "--max-steps", "8",
    "--save-steps", "4",
)  # fmt: skip


def assert_secret_is_nowhere(run: Run) -> None:
    """Neither printed nor in any file of the run, apart from the caller's own."""
    assert SECRET not in run.printed()
    found = [
        path
        for path in run.directory.rglob("*")
        if path.is_file() and not path.is_symlink() and SECRET.encode() in path.read_bytes()
    ]
    assert found == []


def test_a_fault_its_recovery_and_the_end_arrive_and_the_address_stays_secret(runs: Runs) -> None:
    """In the words of the terminal; ranks do not see the address."""
    with receiver() as server:
        run = runs(
            "--notify", server.url, f"--heartbeat-url={server.url}", "--nproc-per-node", "2", "--inject",
            "kill@rank1:step4", *GRPO, environment=LOCAL,
        ).start()  # fmt: skip
        run.until_step(1)
        environment = Path(f"/proc/{run.pid(0)}/environ").read_bytes()
        environment += Path(f"/proc/{run.pid(0)}/cmdline").read_bytes()
        assert SECRET.encode() not in environment
        run.ended()
        text = "\n".join(server.texts)
        assert set(server.pings) == {f"/{SECRET}"}
    shown = run.printed()
    assert 1 <= len(server.texts) <= 3
    assert all(sent.startswith(f"grpo-run {run.status()['run_id']} on ") for sent in server.texts)
    fault, action, recovered, end = (
        next(line for line in text.splitlines() if part in line)
        for part in ("FAULT Rank 1 was killed by SIGKILL", "action ", "RECOVERED ", "Finished at step 8 of 8")
    )
    for line in (fault, action, recovered, end):
        assert line.split(": ", 1)[-1] in shown
    assert text.index("FAULT") < text.index("action ") < text.index("RECOVERED") < text.index("Finished")
    assert "warning: --" not in shown
    assert_secret_is_nowhere(run)
    typed = json.loads((run.directory / "run.json").read_bytes())["typed"]
    assert typed[typed.index("--notify") + 1] == server.url.replace(SECRET, "...")


def test_a_stop_is_told_and_resume_goes_on_with_the_address_of_a_file(runs: Runs, tmp_path: Path) -> None:
    """`resume` goes on without an address that was not recorded, and says so."""
    with receiver() as server:
        hook = tmp_path / "hook"
        hook.write_text(f"{server.url}\n")
        run = runs(
            "--notify", str(hook), "--heartbeat-url", server.url, *GRPO, environment=LOCAL,
        )  # fmt: skip
        with run.held(after=3):
            run.start().until(lambda _: server.pings)
            run.send_signal(signal.SIGTERM)
            run.until_event("stop_requested")
        run.ended(75)
        assert [text.partition(": ")[2][:7] for text in server.texts] == ["Stopped"]
        pings = len(server.pings)
        run.resume(run.directory).ended()
        assert "continuing without --heartbeat-url" in run.printed()
        assert len(server.texts) == 2
        assert ": Finished at step 8 of 8" in server.texts[1]
        assert len(server.pings) == pings
    assert_secret_is_nowhere(run)


def test_a_signal_ends_the_wait_for_the_last_message(runs: Runs) -> None:
    """Ctrl-C exits now, with the code that was decided; the wait would be 10 minutes here."""
    patches = json.dumps({"END_SECONDS": 600.0, "TIMEOUT_SECONDS": 600.0})
    with receiver(silent=True) as server:
        run = runs(
            "--notify", server.url, *GRPO, environment={**LOCAL, "TEST_DRAINS": patches}, program=PATCHED
        ).start()  # fmt: skip
        deadline = time.monotonic() + 120.0
        while not server.texts:
            assert time.monotonic() < deadline, run.tail()
            time.sleep(0.02)
        while run.process.poll() is None:  # the first may arrive just before the wait begins
            assert time.monotonic() < deadline, run.tail()
            run.send_signal(signal.SIGINT)
            time.sleep(0.2)
        run.ended()
    assert "--notify: the last message has not been answered" in run.printed()
