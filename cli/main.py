"""`grpo-run`: picks the command and turns what went wrong into one line and an exit code.

Each command lives in a file of its own and is imported only when it is asked for.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

from grpo_run.runtime.errors import EXIT_USAGE, UsageError

COMMANDS = {
    "launch": "run a training script under supervision; takes torchrun's flags",
    "train": "run a recipe (arithmetic, gsm8k, or a YAML file) under supervision",
    "status": "how a run stands: the verdict first, or one JSON object",
    "report": "one incident as one page: verdict, timeline, stacks, collectives, memory",
    "stop": "ask a run to save on an agreed step and leave",
    "save": "ask a run for a checkpoint at the next agreed step",
    "checkpoints": "list, verify or prune the checkpoints of a run or a directory",
    "demo": "train the arithmetic recipe, kill a rank half-way, recover, draw the picture",
}

USAGE = "usage: grpo-run COMMAND ...\n\n" + "\n".join(
    f"  {name:<11} {text}" for name, text in COMMANDS.items()
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (0, 1, 2, 75 or 93)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if words else EXIT_USAGE
    if words[0] in ("-V", "--version"):
        from importlib.metadata import version

        print(f"grpo-run {version('grpo-run')}")
        return 0
    command, rest = words[0], words[1:]
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, 1)
        hint = f"did you mean `grpo-run {near[0]}`?" if near else f"commands: {', '.join(COMMANDS)}"
        print(f"grpo-run: no command {command!r}; {hint}", file=sys.stderr)
        return EXIT_USAGE
    try:
        code: int = importlib.import_module(f"grpo_run.cli.{command}").main(rest)
    except UsageError as error:
        print(f"grpo-run: {error}", file=sys.stderr)
        return EXIT_USAGE
    return code


if __name__ == "__main__":
    sys.exit(main())
