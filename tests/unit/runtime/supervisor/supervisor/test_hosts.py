"""A fault of another host: what it is called, and what follows from it on this one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.builders.runtime.supervised_run import SupervisedRun

from grpo_run.runtime.history.host_status import read_hosts
from grpo_run.runtime.processes.agent import Directive

LOST = "Host node1 is lost: its supervisor has ended."


def _peer_gone(run: SupervisedRun, **changes: str) -> Directive:
    run.raised(0, **{"type": "RuntimeError", "message": "Connection closed by peer [10.0.0.2]:1", **changes})
    return run.poll(run.ranks.exit(0, code=1))


@pytest.mark.parametrize("failed", [True, False])
def test_a_lost_host_is_the_cause_of_the_connections_that_it_closes(
    start: Callable[..., SupervisedRun], failed: bool
) -> None:
    """Also where no rank has noticed it; nothing of the script's budget is used."""
    run = start(step=7)
    run.supervisor.host_lost(LOST)
    assert (_peer_gone(run) if failed else run.poll()) is Directive.restart
    (incident,) = run.events("incident")
    assert (incident["cause"], incident["sentence"]) == ("node_lost", LOST)
    assert run.supervisor.history.failures_without_progress == 0


def test_a_failure_of_this_hosts_script_is_not_hidden_by_a_lost_host(
    start: Callable[..., SupervisedRun],
) -> None:
    """It counts."""
    run = start(step=7)
    run.supervisor.host_lost(LOST)
    _peer_gone(run, type="KeyError", message="'reward'")
    (incident,) = run.events("incident")
    assert incident["cause"] == "exception"


def test_a_lost_endpoint_ends_the_run_with_75(start: Callable[..., SupervisedRun]) -> None:
    """The others cannot meet; the action does not promise another attempt."""
    run = start(step=7)
    run.supervisor.host_lost("node0:29500 does not answer.", can_meet=False)
    assert run.poll() is Directive.terminate
    assert run.supervisor.exit_code == 75
    assert run.events("action")[-1]["action"] == "stop"
    assert "Stopped: run the same commands again" in run.supervisor.sentence


@pytest.mark.parametrize(("code", "state"), [(93, "failed"), (2, "failed"), (75, "stopped"), (0, "stopped")])
def test_a_run_that_another_host_has_ended_has_its_code(
    start: Callable[..., SupervisedRun], code: int, state: str
) -> None:
    """And its sentence."""
    run = start(step=7)
    run.supervisor.end_without_hosts("Host node1 gave up: why.", code)
    assert run.supervisor.exit_code == code
    assert run.supervisor.sentence.startswith("Host node1 gave up: why.")
    assert run.state.value == state


def test_hosts_that_join_are_admitted_after_the_next_checkpoint(start: Callable[..., SupervisedRun]) -> None:
    """By the host of rank 0, which is told of checkpoints; in every attempt anew."""
    run = start(step=7)
    assert not run.supervisor.admits_hosts()
    run.supervisor.history.highest_checkpoint = (1, 8)
    assert run.supervisor.admits_hosts()
    run.supervisor.membership_changed("host node2 joins")
    assert run.messages[-1] == "host node2 joins; restarting all ranks"
    run.attempt()
    assert not run.supervisor.admits_hosts()


def test_a_host_that_does_not_take_part_is_said_once_and_shown(start: Callable[..., SupervisedRun]) -> None:
    """On the terminal, in the journal and in the file that `status` reads; until it takes part."""
    run = start(step=7)
    for clauses in ({}, {"node1": "stays out: why"}, {"node1": "stays out: why"}):
        run.supervisor.hosts_outside(clauses)
    assert run.messages[-1] == "host node1 stays out: why"
    assert [event["text"] for event in run.events("warning")] == ["host node1 stays out: why"]
    shown = run.supervisor.run.hosts
    assert [host.line for host in read_hosts(shown)] == ["host node1 stays out: why"]
    run.supervisor.hosts_outside({})
    assert read_hosts(shown) == ()


def test_a_batch_that_fewer_hosts_cannot_take_waits_for_all(start: Callable[..., SupervisedRun]) -> None:
    """It is no wrong setting, and no failure of the script."""
    run = start(step=7)
    assert _peer_gone(run, type="HostsMissingError", message="cannot continue with 2 of 3 ranks") is (
        Directive.await_all
    )
    assert run.events("action")[-1]["reason"] == "when all hosts are there"
    assert run.supervisor.history.failures_without_progress == 0
