"""What is shown of the hosts of a run."""

from __future__ import annotations

from pathlib import Path

from support.builders.watchdog.slots import make_slot

from grpo_run.runtime.history.host_status import HostStatus, own_status, read_hosts, write_hosts


def test_a_host_is_shown_in_one_line_that_survives_its_file(tmp_path: Path) -> None:
    """With its ranks, state, steps and phases; a file that is damaged or missing shows nothing."""
    own = own_status("node0", "running", {0: make_slot(0), 1: make_slot(1, step=8), 2: None}.items())
    never = HostStatus(name="1", silent_seconds=75.0)
    assert own.line == "host node0: ranks 0, 1 and 2, running, step 7 to 8, generate, this host"
    assert never.line == "host 1: nothing told yet, not heard for 75 s"
    out = HostStatus(name="node2", outside="was refused: no such script")
    assert out.line == "host node2 was refused: no such script"
    path = tmp_path / "hosts.json"
    assert read_hosts(path) == ()
    write_hosts(path, [own, never, out])
    assert read_hosts(path) == (own, never, out)
    path.write_text('[{"rank": 1}]')
    assert read_hosts(path) == ()
    write_hosts(tmp_path / "no" / "directory", [own])  # only what is shown is lost
