"""All hosts of a run give one verdict on a fault, with the host, the rank and the line where it happened."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import fault
from support.hosts import HostRun, hosts, missing
from support.runs import SCRIPTS
from support.trainer_and_loop import TRAINER

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
SCRIPT = (str(SCRIPTS / TRAINER), "--output-dir", "ours", "--max-steps", "16", "--save-steps", "4")
PROVED_SECONDS = 6.0
"""From the fault to the incident: two seconds until records are read, and what a loaded machine adds."""
STALL_SECONDS = 3.0

Pair = Callable[..., list[HostRun]]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """Starts two hosts with a rank each, with options of `grpo-run launch`."""
    with hosts(tmp_path, 2) as made:

        def start(*options: str, script: tuple[str, ...] = SCRIPT) -> list[HostRun]:
            runs = [HostRun(host, tmp_path, *script, options=options) for host in made]
            for run in runs:
                run.start()
            return runs

        yield start


def _verdict(runs: list[HostRun]) -> dict[str, Any]:
    """The only verdict of all hosts, which must be the same."""
    found = [run.until_event("incident") for run in runs]
    same = ("cause", "culprit", "step", "phase", "sentence", "signature", "lost_connection", "also_failed")
    assert {name: found[0][name] for name in same} == {name: found[1][name] for name in same}
    return found[0]


def _shows_hosts(run: HostRun) -> dict[str, tuple[str, str]]:
    """The rank and the step that `status` shows of each host; not the state, which may be `suspect` while a
    rank is held.
    """
    line = r"host (node\d): rank (\d), \w+, step (\d+), \w+, (?:heard|this host)\n"
    return {name: (rank, step) for name, rank, step in re.findall(line, run.command("status"))}


def test_a_killed_rank_is_named_with_its_host_by_all(pair: Pair, tmp_path: Path) -> None:
    """The other rank, which lost its connection, has not failed; then `status` shows both hosts again."""
    (tmp_path / "hold").write_text("9")  # more than 8 steps, so that the next attempt reaches step 12
    runs = pair(script=(*SCRIPT, "--max-steps", "40"))
    for run in runs:
        run.until_step(6)
    runs[1].kill(1)
    said = _verdict(runs)
    assert (said["cause"], said["culprit"], said["also_failed"]) == ("signal", 1, [])
    assert set(said["lost_connection"]) <= {0}  # the proof does not wait until rank 0 has noticed
    assert said["sentence"].startswith("Rank 1 on host node1 was killed by SIGKILL ")
    for run in runs:
        run.until_event("attempt_started", count=2)
        run.until_step(12)
    runs[0].until(
        lambda _: len(_shows_hosts(runs[0])) == 2 and _shows_hosts(runs[0]) == _shows_hosts(runs[1])
    )
    assert {name: rank for name, (rank, _) in _shows_hosts(runs[0]).items()} == {"node0": "0", "node1": "1"}
    assert all(int(step) >= 12 for _, step in _shows_hosts(runs[0]).values())
    assert ", heard\n" in runs[0].command("status")


@pytest.mark.full
def test_an_exception_has_its_line_on_all_hosts(pair: Pair) -> None:
    """Those that only lost their connection show it, with the traceback."""
    runs = pair(*fault("exception", rank=1, step=7))
    said = _verdict(runs)
    assert (said["cause"], said["culprit"]) == ("exception", 1)
    assert said["sentence"].startswith("Rank 1 on host node1 raised InjectedFault in step 7 ")
    for run in runs:
        run.ended()
        (verdict,) = run.verdicts()
        assert verdict["location"]["function"] == "_raise"
        assert "InjectedFault: injected into rank 1" in verdict["traceback"]


@pytest.mark.full
def test_hosts_that_give_up_do_so_together(pair: Pair) -> None:
    """With the same code and sentence, and within seconds: none waits for a host that has ended."""
    runs = pair(script=(str(SCRIPTS / "failing.py"), "in training", "an exception"))
    for run in runs:
        run.ended(93, timeout_seconds=60)
    assert len({run.status()["sentence"] for run in runs}) == 1


@pytest.mark.full
@pytest.mark.parametrize("kind", ["mismatch-operation", "mismatch-shape", "skip", "return"])
def test_a_deadlock_across_hosts_is_proved_in_seconds(kind: str, pair: Pair) -> None:
    """No host has two ranks, so none can prove it by itself; the run then continues."""
    runs = pair(*fault(kind, rank=1, step=7))
    injected = runs[1].until_event("fault_injected")["time"]
    said = _verdict(runs)
    assert said["time"] - injected < PROVED_SECONDS
    assert said["sentence"].startswith("Deadlock: ")
    for run in runs:
        run.ended()
        (verdict,) = run.verdicts()
        assert verdict["confidence"] == "proved"
        assert set(verdict["locations"]) == {"0", "1"}


@pytest.mark.full
def test_a_slow_rank_and_a_stalled_link_are_no_fault(pair: Pair) -> None:
    """One rank takes seconds longer than the other, and for some of them the link carries nothing."""
    runs = pair(*fault("slow", rank=1, step=7, seconds=8))
    for run in runs:
        run.until_step(6)
    runs[1].host.cut()
    time.sleep(STALL_SECONDS)
    runs[1].host.join()
    for run in runs:
        run.ended()
        assert not run.events("incident")
        assert len(run.events("attempt_started")) == 1
