"""`launch --preflight`: the checks of `grpo-run doctor` before each attempt.

Before the first attempt a failure keeps the run from starting; before a restart it is a warning, because the
run may go on all the same. The speed of the disk is not measured. Called by `cli/launch.py` and
`supervise.py`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

from grpo_run.cli.launching.command import LaunchCommand
from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.files import tree_bytes
from grpo_run.runtime.history.recovery import Checkpoint
from grpo_run.runtime.preflight.checks import Finding, State, examine
from grpo_run.runtime.preflight.reading import read_facts

FIRST_SECONDS, AGAIN_SECONDS = 60.0, 5.0
"""How long the checks may take; a GPU's driver may never answer."""


def check_first(launch: LaunchCommand) -> None:
    """Examine the machine, and print the warnings.

    Raises:
        UsageError: a check has failed.
    """
    options = launch.elastic
    static = options.rdzv_backend == "static" and not options.rdzv_endpoint and not options.standalone
    port = options.master_port if static and options.node_rank == 0 else None
    findings = _examine(launch, launch.config.run_directory, 0, port, FIRST_SECONDS)
    for one in findings:
        if one.state is State.warn:
            print(f"grpo-run: warning: {one.sentence}", file=sys.stderr)
    for one in findings:
        if one.state is State.fail:
            raise UsageError(f"--preflight: {one.sentence}; `grpo-run doctor` shows all checks")


def check_again(launch: LaunchCommand, newest: Checkpoint | None, notify: Callable[[str], None]) -> None:
    """Examine the machine before a restart, and report what has failed.

    Args:
        newest: the newest checkpoint on disk; the next one will be as large, and beside it.
        notify: prints one line.
    """
    folder, size_bytes = launch.config.run_directory, 0
    if newest is not None:
        folder, size_bytes = Path(newest.path).parent, tree_bytes(Path(newest.path))
    for one in _examine(launch, folder, size_bytes, None, AGAIN_SECONDS):
        if one.state is State.fail:
            notify(f"warning: {one.sentence}")


def _examine(
    launch: LaunchCommand, folder: Path, checkpoint_bytes: int, port: int | None, seconds: float
) -> list[Finding]:
    """Return the findings, or that they take too long."""
    environment, ranks = launch.config.environment, int(launch.elastic.nproc_per_node)
    found: list[Finding] = []

    def read() -> None:
        facts = read_facts(folder, environment, ranks=ranks, port=port, checkpoint_bytes=checkpoint_bytes)
        found.extend(examine(facts))

    thread = threading.Thread(target=read, daemon=True, name="grpo-run-preflight")
    thread.start()
    thread.join(seconds)
    late = Finding(
        name="checks", state=State.fail, text=f"not done after {seconds:g} s", fix="does nvidia-smi answer?"
    )
    return [late] if thread.is_alive() else found
