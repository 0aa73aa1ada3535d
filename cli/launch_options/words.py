"""Find the script on a command line, and the words that identify the run: the script and its arguments.

Options come before the script; every word after it belongs to the script, even if it looks like an option. Called by
`parse.py`, and by `cli/train.py` for the words before a recipe.
"""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Sequence

from grpo_run.runtime.errors import UsageError

MODULE_OPTIONS = ("-m", "--module")


class OptionWords:
    """Splits the words of a command into options and the rest, with a parser's option table.

    Args:
        parser: declares the options.
        extra: further options that take a value, such as `--set` of `grpo-run train`.
    """

    def __init__(self, parser: argparse.ArgumentParser, extra: Sequence[str] = ()) -> None:
        actions = parser._actions
        self._names = frozenset(name for action in actions for name in action.option_strings) | set(extra)
        self._switches = frozenset(
            name for action in actions if action.nargs == 0 for name in action.option_strings
        )

    def next_option(self, words: list[str]) -> list[str]:
        """Remove the first option and its value from `words` and return them; [] if a plain word comes first.

        Raises:
            UsageError: there is no such option; the message names the closest one.
        """
        if not words or words[0] == "--" or not words[0].startswith("-"):
            return []
        flag = words.pop(0)
        self._check(flag)
        alone = flag not in self._switches and "=" not in flag and (flag.startswith("--") or len(flag) == 2)
        return [flag, words.pop(0)] if alone and words else [flag]

    def _check(self, flag: str) -> None:
        name = flag.partition("=")[0]
        if not name.startswith("--") or name in self._names:
            return
        near = difflib.get_close_matches(name.replace("_", "-"), sorted(self._names), 1)
        hint = f"did you mean {near[0]}?" if near else "see grpo-run launch --help"
        raise UsageError(f"no option {name}; {hint}")

    def split_generation(self, arguments: Sequence[str]) -> list[str]:
        """Return the words with `--generation a=1 b=2` written as one option per value.

        The list ends at the first word that is not KEY=VALUE.

        Raises:
            UsageError: an option is unknown, or no KEY=VALUE follows `--generation`.
        """
        result: list[str] = []
        words = list(arguments)
        while words and words[0].startswith("-") and words[0] != "--":
            if words[0] != "--generation":
                result += self.next_option(words)
                continue
            words.pop(0)
            if not _is_setting(words):
                raise UsageError("--generation: write KEY=VALUE after it")
            while _is_setting(words):
                result.append(f"--generation={words.pop(0)}")
        return result + words

    def identity(self, arguments: Sequence[str]) -> list[str]:
        """Return the words that identify the run: the script or `-m` with a module, and its arguments.

        Options are left out: a run that is continued with another time limit is the same run. A script's path is
        relative to the working directory, without symbolic links, so that `cli/train.py` and `./train.py` are one script.
        """
        words = self.split_generation(arguments)
        module: list[str] = []
        while option := self.next_option(words):
            if option[0] in MODULE_OPTIONS:
                module = ["-m"]
        words = words[1:] if words[:1] == ["--"] else words
        if not words or module:
            return [*module, *words]
        return [os.path.relpath(os.path.realpath(words[0])), *words[1:]]


def _is_setting(words: Sequence[str]) -> bool:
    return bool(words) and "=" in words[0] and not words[0].startswith("-")
