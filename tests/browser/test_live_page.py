"""The live page in a real browser: it follows a run through a fault, a kill of its supervisor and its end.

Requires Chromium; `tests/support/install-chromium.sh` installs it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support import runs
from support.browser import Page, browser
from support.incidents import HOSTILE, write_incident
from support.journal import event

from grpo_run.runtime.history.journal import Journal

SECONDS = 60.0
HOSTILE_TEXT = f"\x1b[2J\x1b]0;taken\x07\0{HOSTILE}"


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the runs in a folder, or in `runs/` of it; yield the address of the page."""
    command = [sys.executable, "-P", "-m", "grpo_run.cli.main", "serve", "--address", "127.0.0.1:0"]
    if not (folder / "runs").exists():
        command.append(str(folder))
    environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder)
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None
        yield found[0]
    finally:
        process.terminate()
        process.wait(SECONDS)


def hosts(page: Page) -> set[str | None]:
    """The machines that the page has asked for something."""
    return {
        urlsplit(url).hostname for url in page.requests if urlsplit(url).scheme in ("http", "https", "ws")
    }


def step_above(step: int) -> str:
    """Whether the page shows a step above this."""
    return f"parseInt(document.querySelector('#facts dd')?.textContent) > {step}"


def headline(test: str) -> str:
    """Whether the verdict of the page passes a test of strings."""
    return f"document.querySelector('h1').textContent.{test}"


def test_the_page_follows_a_run(tmp_path: Path) -> None:
    """The step advances; a fault is the verdict until it is recovered; a killed supervisor and the end of the
    run are said; nothing is asked of another machine, and the console has no error.
    """
    run = runs.Run(
        tmp_path,
        [
            "--nproc-per-node", "2", "--log-completions", "1", str(runs.SCRIPTS / "grpo.py"),
            "--output-dir", "out", "--max-steps", "20", "--logging-steps", "1",
        ],
    )  # fmt: skip
    try:
        with contextlib.ExitStack() as stack:
            let = stack.enter_context(run.held(after=2))
            run.start().until_step(2)
            url, page = stack.enter_context(served(tmp_path)), stack.enter_context(browser(tmp_path))
            page.show(width=1200, height=1600)
            page.open(url)
            page.wait(step_above(1), SECONDS)
            let(4)
            page.wait(step_above(3), SECONDS)
            let(0)  # the next attempt begins no step until the page has shown the fault
            run.kill(1)
            page.wait(headline("startsWith('Rank 1 was killed by SIGKILL')"), SECONDS)
            let(4)
            page.wait(headline("includes('1 fault recovered')"), SECONDS)
            page.wait("document.querySelectorAll('svg .fault').length > 0", SECONDS)
            assert page.value("document.querySelector('#incidents a').href").endswith("/1")
            assert page.value("document.querySelectorAll('.completion').length") > 0
            assert page.value("document.querySelectorAll('.ranks tr').length") == 3
            assert page.value("[...state.lanes.keys()].sort().join()") == "0,1"
            run.send_signal(signal.SIGKILL)
            page.wait("document.querySelector('.state').textContent === 'unknown'", SECONDS)
            run.wait()
            let(20)
            run.start().ended()
            page.wait("document.querySelector('.state').textContent === 'finished'", SECONDS)
            page.open(f"{url}?again")
            page.wait(headline("startsWith('Finished at step 20 of 20')"), SECONDS)
            page.wait("document.querySelectorAll('svg .line').length >= 2", SECONDS)
            assert page.console == []
            assert hosts(page) == {"127.0.0.1"}
    finally:
        run.close()


def plant(folder: Path) -> None:
    """Write a run in which every text of the script is hostile, and some are very long."""
    run = write_incident(folder, sentence=HOSTILE_TEXT)
    run.write_run({"run_id": HOSTILE_TEXT})
    journal = Journal(run.journal, HOSTILE_TEXT)
    journal.write(event("step_logged", rank=0, step=42, train_call=1, reward=0.5))
    journal.write(event("checkpoint_failed", step=42, reason=HOSTILE_TEXT))
    journal.write(
        event("incident", step=42, cause=HOSTILE_TEXT, culprit=0, signature="t",
        incident=str(run.incidents / "0001-x"), sentence=HOSTILE_TEXT + "x" * 10_000_000,
    ))  # fmt: skip
    run.completions.mkdir()
    row = {"train_call": 1, "step": 42, "attempt": 0, "group": 0, "tokens": 1, "rewards": {HOSTILE_TEXT: 1.0}}
    texts = {"prompt": HOSTILE_TEXT, "completion": HOSTILE_TEXT + "y" * 100_000, "ended": HOSTILE_TEXT}
    lines = [json.dumps({**row, **texts, "position": position}) for position in range(4)]
    (run.completions / "rank0.jsonl").write_text("\n".join(lines) + "\n")


def test_hostile_texts_are_shown_as_text(tmp_path: Path) -> None:
    """In prompts, completions, exceptions and ids of runs; on a narrow screen and in the dark too."""
    plant(tmp_path)
    with served(tmp_path) as url, browser(tmp_path) as page:
        page.show(width=390, height=1600, dark=True)
        page.open(url)
        page.wait("document.querySelectorAll('.completion').length === 4", SECONDS)
        page.wait("document.querySelectorAll('#all td').length > 0", SECONDS)
        page.value("document.querySelector('details').open = true")
        assert page.value("document.title").startswith("⚠ 41/100 · ␛[2J")
        assert page.value("document.querySelectorAll('img, script:not([src])').length") == 0
        assert "␛[2J" in page.value("document.querySelector('h1').textContent")
        assert page.value("document.documentElement.scrollWidth") <= 390
        assert page.value("document.documentElement.outerHTML.length") < 300_000
        assert page.value("getComputedStyle(document.documentElement).backgroundColor") == "rgb(20, 24, 29)"
        assert page.console == []
        assert hosts(page) == {"127.0.0.1"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_machine_reads_nothing(tmp_path: Path) -> None:
    """Neither the token, nor what a run keeps, nor a page without the token."""
    plant(tmp_path)
    tmp_path.chmod(0o755)
    with served(tmp_path) as url:
        port = str(urlsplit(url).port)
        files = [tmp_path / "state" / "grpo-run" / "serve.token", *(tmp_path / "runs" / "night").rglob("*")]
        private = [tmp_path / "runs" / "night", files[0]]
        # a socket, because the libraries of this interpreter may not be readable either
        script = (
            "import encodings.idna, os, socket, sys\n"
            "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            "for file in sys.argv[2:]:\n"
            "    if os.access(file, os.R_OK): print('reads', file)\n"
            "for path in ('/', '/x/', '/x/events'):\n"
            "    page = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
            "    page.sendall(f'GET {path} HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n'.encode())\n"
            "    print(page.recv(99).split()[1].decode())\n"
        )
        ran = subprocess.run(
            [sys.executable, "-c", script, port, *map(str, [*private, *files])],
            capture_output=True, text=True, timeout=SECONDS, check=True,
        )  # fmt: skip
    assert ran.stdout.split() == ["404"] * 3
