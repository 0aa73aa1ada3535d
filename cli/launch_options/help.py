"""The text of `grpo-run launch --help`: our options by group, exit codes, examples, then torchrun's options."""

from __future__ import annotations

import argparse
from typing import NoReturn

from grpo_run.runtime.errors import UsageError

USAGE = "grpo-run launch [options] SCRIPT.py [script arguments]\n       grpo-run launch [options] -m MODULE [script arguments]"
DESCRIPTION = """\
Run a training script under supervision. Takes the place of torchrun and
accepts its options. When a rank dies or hangs, grpo-run records evidence,
names the cause, and restarts the ranks from the newest checkpoint or snapshot.
The same command resumes a run that was stopped."""
EXIT_CODES = """\
exit codes:
  0    the script has finished, and what it scheduled is on disk
  2    the command or a setting is wrong; nothing was lost
  75   stopped on request, with a checkpoint; run the same command to resume
  93   gave up, or grpo-run itself failed; the reason and the report are in the
       run directory; or stopped, and the same command would start over; or the
       script ran to its end, and a checkpoint that it scheduled is not on disk:
       the last line says where it is and what writes it
A script with no Trainer and no loop that ends itself after SIGTERM sets the
exit code of the stop."""
EXAMPLES = """\
examples:
  grpo-run launch --nproc-per-node 2 train.py --lr 1e-6
  grpo-run launch --accelerate-config ddp.yaml train.py
  grpo-run launch --nproc-per-node 2 -m trl.scripts.grpo --config grpo.yaml
  grpo-run launch --nproc-per-node 2 --show-ranks all train.py
  grpo-run launch --nproc-per-node 2 --inject kill@rank1:step7 train.py

Each rank's output is in attempts/NNN/rankN.log of the run directory, and its
standard error in rankN.err if both streams of this command are apart. Ranks
inherit standard input, as under torchrun."""
TORCHRUN = """\
torchrun's options. These differ under grpo-run:
  --max-restarts    counts failures in a row without a newer checkpoint;
                    default 3
  --log-dir, --redirects, --tee, --start-method
                    are ignored, with a warning
  --no-python, --run-path
                    are refused: a rank must be a Python script or module"""
TORCHRUN_GROUPS = frozenset({"positional arguments", "options", "optional arguments"})


class LaunchParser(argparse.ArgumentParser):
    """Argument parser that prints our options first and raises `UsageError` instead of exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise the one line that the user sees."""
        raise UsageError(f"{message} (see grpo-run launch --help)")

    def format_help(self) -> str:
        """Return the whole help text."""
        groups = [group for group in self._action_groups if group.title not in TORCHRUN_GROUPS]
        torchruns = [group for group in self._action_groups if group.title in TORCHRUN_GROUPS]
        ours = self._section(groups)
        return (
            "\n\n".join(
                [
                    f"usage: {USAGE}",
                    DESCRIPTION,
                    ours,
                    EXIT_CODES,
                    EXAMPLES,
                    TORCHRUN,
                    self._section(torchruns),
                ]
            ).rstrip("\n")
            + "\n"
        )

    def _section(self, groups: list[argparse._ArgumentGroup]) -> str:
        formatter = self._get_formatter()
        for group in groups:
            formatter.start_section(group.title)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        return formatter.format_help().strip("\n")
