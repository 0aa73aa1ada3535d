"""`grpo-run launch [options] SCRIPT.py [script arguments]`: run a training script under supervision.

Parses the command line, calls `launch` with the request, and exits with the run's exit code.
"""

from __future__ import annotations

from collections.abc import Sequence

from grpo_run.cli.launching.command import parse
from grpo_run.cli.launching.refusal import tell_others
from grpo_run.runtime.errors import UsageError


def main(arguments: Sequence[str]) -> int:
    """Launch and supervise; returns the run's exit code."""
    try:
        request, display = parse(arguments)
        from grpo_run.runtime.launching.launch import launch  # help is shown without what it imports

        return launch(request, display, exits_after=True).exit_code
    except UsageError as error:
        tell_others(arguments, error)
        raise
