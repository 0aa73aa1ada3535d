"""A program that launches runs by `launch`, and prints what it sees as JSON: python launches.py SCRIPT.

Two ranks of a script through a kill, the same request again, one that is refused, and another run; then what
the launches have left changed in this process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.features import feature_settings
from grpo_run.runtime.launching.launch import (
    LaunchOptions,
    RunOptions,
    RunRequest,
    RunResult,
    TorchrunOptions,
    launch,
)


def settings(name: str, **values: Any) -> Any:
    """The settings of a feature."""
    (found,) = [one for one in feature_settings() if name == one.NAME]
    return found(**values)


def state() -> dict[str, Any]:
    """What a launch changes in its process while it lasts."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    return {
        "handlers": handlers,
        "environment": dict(os.environ),
        "streams": (sys.stdout, sys.stderr),
        "hook": threading.excepthook,
    }


def shown(result: RunResult) -> dict[str, Any]:
    """A result as JSON values."""
    recoveries = result.status.history.recoveries if result.status is not None else []
    return {
        "exit_code": result.exit_code,
        "state": result.state,
        "sentence": result.sentence,
        "directory": str(result.run_directory),
        "recoveries": [recovery.cause for recovery in recoveries],
    }


def main() -> None:
    """Launch, and print."""
    request = RunRequest(
        target=sys.argv[1],
        arguments=("--output-dir", "out", "--max-steps", "4"),
        torchrun=TorchrunOptions(nproc_per_node="2"),
        launch=LaunchOptions(run_dir="first"),
        options=RunOptions(snapshot_every=1),
        features=(settings("injections", inject=("kill@rank1:step3",)),),
    )
    before = state()
    seen: dict[str, Any] = {"killed": shown(launch(request)), "again": shown(launch(request))}
    try:
        launch(replace(request, torchrun=TorchrunOptions(nproc_per_node="none")))
    except UsageError as error:
        seen["refused"] = str(error)
    Path("plain.py").write_text("print('of another run')\n")
    other = RunRequest(target="plain.py", launch=LaunchOptions(run_dir="second"))
    seen["other"] = shown(launch(other))
    after = state()
    seen["changed"] = [name for name in before if before[name] != after[name]]
    thread = threading.Thread(target=lambda: seen.update(thread=_refusal(other)))
    thread.start()
    thread.join()
    Path("seen.json").write_text(json.dumps(seen))


def _refusal(request: RunRequest) -> str:
    try:
        launch(request)
    except UsageError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main()
