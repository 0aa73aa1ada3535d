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
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support import runs
from support.browser import Page, browser
from support.incidents import HOSTILE, write_incident
from support.journal import event
from support.night import write_night

from grpo_run.dashboards.live.feed import key_of
from grpo_run.runtime.history.journal import Journal
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.watchdog.rank_metrics import LOGGED_FIELDS

SECONDS = 60.0
HOSTILE_TEXT = f"\x1b[2J\x1b]0;taken\x07\0{HOSTILE}"


@contextlib.contextmanager
def served(folder: Path, address: str = "127.0.0.1:0") -> Iterator[str]:
    """Serve the runs in a folder, or in `runs/` of it; yield the address of the page."""
    command = [sys.executable, "-P", "-m", "grpo_run.cli.main", "serve", "--address", address]
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


def has_metrics(*keys: str) -> str:
    """Whether the page draws these charts."""
    figures = " && ".join(f"document.querySelector('figure[data-name={key}] .line')" for key in keys)
    return f"Boolean({figures})"


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
            page.wait(has_metrics("step_seconds", "tokens_per_second", "reward_function", "entropy"), SECONDS)
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
        page.wait("document.querySelectorAll('#all li').length > 0", SECONDS)
        page.value("document.querySelector('details').open = true")
        assert page.value("document.title").startswith("⚠ 41/100 · ␛[2J")
        assert page.value("document.querySelectorAll('img, script:not([src])').length") == 0
        assert "␛[2J" in page.value("document.querySelector('h1').textContent")
        assert page.value("document.documentElement.scrollWidth") <= 390
        assert page.value("document.documentElement.outerHTML.length") < 300_000
        assert page.value("getComputedStyle(document.documentElement).backgroundColor") == "rgb(20, 24, 29)"
        assert page.console == []
        assert hosts(page) == {"127.0.0.1"}


def text(selector: str) -> str:
    """The text of an element, or of all of its kind."""
    return f"[...document.querySelectorAll({selector!r})].map(one => one.textContent).join('\\n')"


def test_everything_that_is_measured_is_on_the_page(tmp_path: Path) -> None:
    """Of an agent with tools on two ranks: what the exporter has is drawn or listed with a reason, and what
    is drawn are the functions, the tools and the pace.
    """
    port = runs.free_port()
    run = runs.Run(
        tmp_path,
        [
            "--nproc-per-node", "2", "--metrics-addr", f"127.0.0.1:{port}", str(runs.SCRIPTS / "agent.py"),
            "--output-dir", "out", "--max-steps", "400", "--logging-steps", "1",
        ],
    )  # fmt: skip
    try:
        run.start().until_step(4)
        with served(tmp_path) as url, browser(tmp_path) as page:
            page.show(width=1280, height=800)
            page.open(url)
            page.wait(has_metrics("reward", "reward_function", "reward_std", "tool_calls", "tool_seconds",
                                  "tokens_per_second", "completions_per_second", "step_seconds",
                                  "zero_variance_groups", "grad_norm", "rank_memory"), SECONDS)  # fmt: skip
            page.value("document.querySelector('#values').open = true")
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                exported = set(re.findall(r"^# TYPE (grpo_\w+) ", answer.read().decode(), re.MULTILINE))
            assert len(exported) > 80
            for name in exported:
                page.wait(f"{text('#values code')}.split('\\n').includes({name!r})", SECONDS)
            rows = page.value(text("#values tr"))
            assert all(re.search("chart “|Prometheus|in all", row) for row in rows.splitlines()[1:])
            assert page.console == []
    finally:
        run.close()


def night(folder: Path, name: str, *, faults: int = 1) -> RunDirectory:
    """A run that has finished, with the logs of two ranks; rank 1 failed in attempt 0."""
    made = write_night(folder / name, steps=300, faults=tuple(range(57, 57 + 9 * faults, 9)))
    (folder / "runs").mkdir(exist_ok=True)
    path = made.path.rename(folder / "runs" / name)
    run = RunDirectory(path=path)
    run.write_run({"run_id": name})
    run.attempt(0).mkdir()
    for rank in range(2):
        lines = [f"step {step}: loss {step / 7:.3f} of rank {rank}" for step in range(200)]
        if rank:
            lines[150:150] = ["Traceback (most recent call last):", "RuntimeError: planted </script>"]
        (run.attempt(0) / f"rank{rank}.log").write_text("\n".join(lines) + "\n")
    return run


def test_a_fault_opens_the_log_at_its_line(tmp_path: Path) -> None:
    """Of the rank that it is of; a search looks at all ranks, and a rank can be left out."""
    night(tmp_path, "evening")
    with served(tmp_path) as url, browser(tmp_path) as page:
        page.show(width=1280, height=800)
        page.open(url)
        page.wait("document.querySelectorAll('#incidents a[href=\"#log\"]').length === 1", SECONDS)
        page.wait("document.querySelectorAll('figure[data-name=reward] .redone').length === 1", SECONDS)
        page.value("document.querySelector('#incidents a[href=\"#log\"]').click()")
        page.wait("document.querySelectorAll('.output .here').length === 1", SECONDS)
        assert page.value(text(".output .here")) == "1 Traceback (most recent call last):"
        box, line = (
            f"document.querySelector('{one}').getBoundingClientRect()" for one in (".output", ".here")
        )
        assert page.value(f"{line}.top >= {box}.top && {line}.bottom <= {box}.bottom")
        assert page.value(f"{box}.top >= 0 && {box}.top < innerHeight")
        assert page.value("document.querySelectorAll('.output > :not([data-rank=\"1\"])').length") == 0
        page.value(
            "(box => { box.value = 'LOSS 1.000'; box.onchange({ target: box }); })"
            "(document.querySelector('#log input[type=search]'))"
        )
        found = "1 step 7: loss 1.000 of rank 1"
        page.wait(f"{text('.output > div')} === '0 step 7: loss 1.000 of rank 0\\n{found}'", SECONDS)
        page.value("document.querySelector('.ranks-shown [value=\"0\"]').click()")
        assert page.value(text(".output > div:not([hidden])")) == found
        assert page.console == []


def test_runs_are_drawn_over_each_other(tmp_path: Path) -> None:
    """A tick adds the curves of another run, in a colour of its own; all charts share one cursor."""
    night(tmp_path, "evening", faults=0)
    night(tmp_path, "morning")
    with served(tmp_path) as url, browser(tmp_path) as page:
        page.show(width=1280, height=800)
        page.open(url)
        lines = "document.querySelectorAll('figure[data-name=reward] .line')"
        page.wait(f"{lines}.length === 1", SECONDS)
        page.wait("document.querySelectorAll('#all input:not(:disabled)').length === 1", SECONDS)
        page.value("document.querySelector('#all input:not(:disabled)').click()")
        page.wait(f"{lines}.length === 2", SECONDS)
        assert page.value(f"new Set([...{lines}].map(one => one.style.stroke)).size") == 2
        assert sorted(page.value(text(".compared li")).split("\n")) == ["evening", "morning"]
        page.value("moveCursors(100)")
        captions = page.value(text("figcaption span")).split("\n")
        assert len(captions) >= 4
        assert all(caption.startswith("step 100") for caption in captions)
        page.value("document.querySelector('#smoothing').value = '.9'")
        page.value("showCurves()")
        assert page.value("document.querySelectorAll('figure[data-name=reward] .raw').length") == 2
        page.value("document.querySelector('#all input:checked:not(:disabled)').click()")
        page.wait(f"{lines}.length === 1", SECONDS)
        assert page.console == []


def test_a_page_left_open_shows_the_new_run(tmp_path: Path) -> None:
    """Its verdict and its curves, also after the server was started again; the old one stays where it was
    chosen, with a word on the new one.
    """
    night(tmp_path, "evening")
    new = RunDirectory(path=tmp_path / "runs" / "morning")
    with contextlib.ExitStack() as stack:
        address = f"127.0.0.1:{runs.free_port()}"
        server = stack.enter_context(contextlib.ExitStack())
        url, page = server.enter_context(served(tmp_path, address)), stack.enter_context(browser(tmp_path))
        page.show(width=1280, height=800)
        page.open(url)
        page.wait(headline("startsWith('Finished at step 300')"), SECONDS)
        new.create()
        new.write_run({"run_id": "morning"})
        stack.enter_context(new.locked())
        journal = Journal(new.journal, "morning")
        journal.write(event("run_started"))
        journal.write(event("train_started", rank=0, step=0, train_call=1, target_steps=9))
        journal.write(event("state_changed", **{"from": "starting", "to": "running"}))
        page.wait(headline("includes('of 9')"), SECONDS)
        server.close()
        page.wait("document.querySelector('#connection').className === 'lost'", SECONDS)
        journal.write(event("step_committed", step=4, train_call=1))
        journal.write(
            event("incident", step=4, cause="signal", culprit=1, signature="s", sentence="Rank 1 was killed.")
        )
        assert server.enter_context(served(tmp_path, address)) == url
        page.wait(headline("startsWith('Rank 1 was killed')"), SECONDS)
        page.wait("document.querySelector('#connection').textContent === 'live'", SECONDS)
        bar = "getComputedStyle(document.querySelector('#progress i')).backgroundColor"
        assert page.value(bar) == "rgb(179, 55, 47)"
        page.value("choose(state.runs.find(run => run.run_id === 'evening').key)")
        page.wait(headline("startsWith('Finished at step 300')"), SECONDS)
        page.wait(f"{text('.other')}.startsWith('morning is ')", SECONDS)


@pytest.mark.parametrize(("width", "height"), [pytest.param(1280, 800, marks=pytest.mark.full), (390, 844)])
def test_nothing_is_more_than_three_screens_away(tmp_path: Path, width: int, height: int) -> None:
    """However many faults, completions and runs there are; a phone shows the verdict and the reward first."""
    run = night(tmp_path, "evening", faults=20)
    for number in range(40):
        other = RunDirectory(path=tmp_path / "runs" / f"older-{number}")
        other.create()
        other.write_run({"run_id": f"older-{number}"})
    journal = Journal(run.journal, "evening")
    logged = dict.fromkeys(LOGGED_FIELDS, 0.5)
    for step in (299, 300):
        names = (
            "length",
            "format",
            "accuracy_reward",
            "language",
            "tool_use",
            "cosine_scaled_reward",
            "tests",
        )
        functions = {name: {"mean": 0.5, "std": 0.1} for name in names}
        fields: dict[str, Any] = {"rank": 0, "step": step, "train_call": 1, "reward_functions": functions}
        journal.write(event("step_logged", **fields, **logged))
    run.completions.mkdir()
    rows = [
        {
            "train_call": 1, "step": step, "attempt": 0, "group": group, "position": position, "tokens": 9,
            "prompt": f"prompt {group}", "completion": "word " * 200, "rewards": {"length": position / 8},
        }
        for step in (298, 299) for group in range(12) for position in range(8)
    ]  # fmt: skip
    (run.completions / "rank0.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with served(tmp_path) as url, browser(tmp_path) as page:
        page.show(width=width, height=height)
        page.open(f"{url}?run={key_of(run.path)}")
        page.wait("document.querySelectorAll('#samples > div > details').length === 12", SECONDS)
        page.wait(has_metrics("reward", "entropy"), SECONDS)
        page.value(
            "document.querySelectorAll('#samples > div > details').forEach(one => { one.open = true; })"
        )
        page.wait("document.querySelectorAll('#samples > div > details[open]').length === 5", SECONDS)
        best = page.value(text("#samples > div > details[open] > .completion b")).split("\n")
        assert best == ["0.875", "0"] * 5
        ranks = [
            {
                "rank": rank, "local_rank": rank, "observable": True, "step": 300, "phase": "generate",
                "pid": 1, "phase_seconds": 1.0, "late_seconds": 0.1, "state": "on", "awaited": rank == 3,
                "waits": rank != 3, "memory": {"now_bytes": 1, "peak_bytes": 2, "capacity_bytes": 4},
            }
            for rank in range(64)
        ]  # fmt: skip
        one = {"at": 1.0, "verified": True, "path": "/x", "train_call": 1}
        saved = [{"step": 9 * at, **one} for at in range(8)]
        more = json.dumps({"ranks": ranks, "checkpoints": saved, "advice": ["Use larger batches."]})
        page.value(f"showRun({{ ...state.run, ...{more} }})")
        page.value(
            "addLanes({ now: 9, ranks: Object.fromEntries(state.run.ranks.map(one => [one.rank,"
            " [['generate', 1, 5]]])) }, true)"
        )
        for part in page.value(
            "[...document.querySelectorAll('main > details')].map(one => one.hidden ? '' : one.id)"
        ):
            assert part
            page.value(f"document.querySelector('#{part}').open = true")
            page.wait(f"document.querySelector('#{part}').open", SECONDS)
            page.value("redrawLanes()")
            assert page.value("document.documentElement.scrollHeight") <= 3 * height, part
            assert page.value("document.documentElement.scrollWidth") <= width, part
        page.value("document.querySelectorAll('#curves details').forEach(one => { one.open = true; })")
        legends = "[...document.querySelectorAll('figure p')]"
        page.wait(f"{legends}.filter(one => one.children.length === {len(names)}).length > 0", SECONDS)
        is_cut = "one.scrollHeight > one.clientHeight || one.scrollWidth > one.clientWidth"
        cut = f"{legends}.filter(one => {is_cut})"
        assert page.value(f"{cut}.map(one => one.textContent).join()") == ""
        page.value("document.querySelectorAll('#curves details').forEach((one, at) => { one.open = !at; })")
        for first in ("h1", "figure[data-name=reward] .line"):
            assert page.value(f"document.querySelector('{first}').getBoundingClientRect().bottom") <= height
        assert page.console == []
