"""The `grpo-run` command: select a subcommand and turn usage errors into one line and an exit code.

Each subcommand is in its own file and is imported only when it is asked for.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from grpo_run.cli import feature_command
from grpo_run.runtime.errors import EXIT_STOPPED, EXIT_USAGE, UsageError

COMMANDS = {
    "plan": "predict the memory of a job before it runs, without a GPU",
    "launch": "run a training script under supervision; accepts torchrun's options",
    "train": "train a recipe (arithmetic, gsm8k or a YAML file) under supervision",
    "rehearse": "run a few steps of a job with one fault after another, and compare the weights",
    "resume": "start the recorded command of a run again",
    "status": "show the state of a run",
    "logs": "show what the ranks of a run print",
    "serve": "serve a live page of all runs",
    "top": "show runs and ranks live in the terminal",
    "report": "write a run, or one of its incidents, as an HTML page",
    "trace": "write a run as a trace for Perfetto",
    "dashboards": "write Grafana dashboards, alert rules and their configuration",
    "stop": "ask a run to save a checkpoint and stop",
    "save": "ask a run to save a checkpoint at the next step",
    "checkpoints": "list, verify or prune checkpoints",
    "replay": "do a step of a run again, and compare it with what the run has recorded",
    "demo": "train the arithmetic recipe, kill a rank, recover, and write the report",
    "completion": "print what lets bash, zsh or fish complete commands, options and runs",
    **feature_command.COMMANDS,
}
RUNS = frozenset({"launch", "train", "resume"})
"""Commands whose interruption leaves a run that the same command resumes."""

USAGE = "\n".join(
    [
        "usage: grpo-run COMMAND ...",
        "",
        *(f"  {name:<11} {text}" for name, text in COMMANDS.items()),
        "",
        "`grpo-run help COMMAND` describes a command.",
    ]
)

EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""
EXIT_BROKEN_PIPE = 141
"""128 + SIGPIPE, as shells report it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code.

    0, 1, 2, 75 and 93 are the subcommands' own. 130 means interrupted and 141 that standard output was
    closed.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        _open_standard_streams()
        _handle_early_signals(words)
    try:
        code = _run(words)
        _flush()
    except UsageError as error:
        print(f"grpo-run: {error}", file=sys.stderr)
        return EXIT_USAGE
    except BrokenPipeError:
        _discard_output()
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        print("grpo-run: interrupted", file=sys.stderr)
        return _interrupted_code(words)
    return code


def _open_standard_streams() -> None:
    """Open the null device for streams that the shell has closed (`>&-`).

    Otherwise a file of the run gets the number of the stream, and what ranks print goes into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number, which is this one
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115 - until the exit


def _flush() -> None:
    """Write what is left of the output. A full disk does not change how a run ended."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"grpo-run: standard output: {error.strerror}", file=sys.stderr)
        _discard_output()


def _discard_output() -> None:
    # the interpreter flushes standard output once more at exit, and would print a traceback
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(words: list[str]) -> int:
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
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
        raise UsageError(f"no command {command!r}; {hint}")
    if command in feature_command.COMMANDS:
        return feature_command.main(command, rest)
    module = importlib.import_module(f"grpo_run.cli.{command}")
    if command not in RUNS and isinstance(signal.getsignal(signal.SIGINT), functools.partial):
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the command may have to clean up
    code: int = module.main(rest)
    return code


def _interrupted_code(words: Sequence[str]) -> int:
    return EXIT_STOPPED if words and words[0] in RUNS else EXIT_INTERRUPTED


def _handle_early_signals(words: Sequence[str]) -> None:
    """Let the signals that stop a run, and Ctrl-C in any command, end it while libraries are imported."""
    stops = (signal.SIGTERM, signal.SIGHUP) if words and words[0] in RUNS else ()
    for number in (signal.SIGINT, *stops):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, functools.partial(_exit_at_once, _interrupted_code(words)))


def _exit_at_once(code: int, number: int, frame: object) -> None:
    """Exit while libraries are imported, where an exception would surface as another error.

    A run replaces this handler before it starts ranks; until then there is nothing to save.
    """
    os.write(sys.stderr.fileno(), b"grpo-run: interrupted\n")
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
