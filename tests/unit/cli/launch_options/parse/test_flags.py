"""Options are a promise: none is removed, every one of torchrun's is accepted, and each has a help text."""

from __future__ import annotations

import argparse

from grpo_run.cli.launch_options.flags import build_parser

OUR_FLAGS = {
    "--accelerate-config", "--accept-change", "--allow-degrade", "--allow-untested", "--deadline-ceiling", "--deadline-exit",
    "--deadline-first", "--deadline-floor", "--fresh", "--generation", "--guard", "--hygiene-every", "--inject",
    "--keep", "--mask-capped", "--memory-plan", "--memory-trace", "--metrics-addr", "--no-memory-forecast", "--no-preload", "--on-end",
    "--repeat-rewards-above",
    "--on-resume-failure", "--require-resume", "--resume-from", "--reward-timeout", "--reward-workers", "--run-dir", "--run-id",
    "--show-ranks", "--snapshot-dir", "--snapshot-every", "--stop-timeout", "--strict-drills", "--tool-timeout",
    "--vote-timeout",
}  # fmt: skip
"""An option is a promise. Add a new one here and to the documentation."""


def torchruns() -> argparse.ArgumentParser:
    """torchrun's own parser."""
    from torch.distributed.run import get_args_parser

    return get_args_parser()


def flags(parser: argparse.ArgumentParser) -> set[str]:
    """Every spelling of every option."""
    return {word for action in parser._actions for word in action.option_strings}


def test_our_options_are_a_promise() -> None:
    """An option is not removed or renamed."""
    assert flags(build_parser()) - flags(torchruns()) == OUR_FLAGS


def test_every_option_of_torchrun_is_accepted() -> None:
    """`grpo-run launch` can replace `torchrun` in any command."""
    assert flags(torchruns()) <= flags(build_parser())


def test_every_option_has_a_help_text() -> None:
    """`--help` describes every option."""
    actions = [action for action in build_parser()._actions if action.option_strings]
    assert [action.option_strings for action in actions if not action.help] == []
