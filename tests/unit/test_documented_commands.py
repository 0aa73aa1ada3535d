"""Every `grpo-run` command of the README and the guides is one that the command line takes."""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.import_graph import REPOSITORY

from grpo_run.cli.command_parser import CommandParser
from grpo_run.cli.launching.command import parse
from grpo_run.cli.launching.options import OptionWords, build_parser
from grpo_run.cli.main import COMMANDS, main
from grpo_run.cli.train import launch_arguments, split
from grpo_run.runtime.errors import UsageError
from grpo_run.trainers.recipes.recipe import load_recipe

PAGES = [
    REPOSITORY / "README.md",
    *sorted((REPOSITORY / "docs" / "guide").glob("*.md")),
    REPOSITORY / "docs" / "reference" / "command-line.md",
    REPOSITORY / "docs" / "reference" / "checkpoints.md",
]
END = {"|", "&&", ";", ">"}


class ParsedError(Exception):
    """The command's parser took its arguments; nothing of the command itself has run."""


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words after `grpo-run` of each command in a shell block; a line with brackets is none."""
    for block in re.findall(r"^```sh\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        for line in re.sub(r" *\\\n *", " ", block).splitlines():
            words = shlex.split(line, comments=True)
            if "grpo-run" in words and "[" not in line:
                rest = words[words.index("grpo-run") + 1 :]
                yield rest[: next((place for place, word in enumerate(rest) if word in END), len(rest))]


def given() -> list[tuple[str, list[str]]]:
    """Every command with its page, once."""
    found = {
        (str(page.relative_to(REPOSITORY)), tuple(words))
        for page in PAGES
        for words in commands(page.read_text(encoding="utf-8"))
    }
    return [(page, list(words)) for page, words in sorted(found)]


@pytest.mark.parametrize(("page", "words"), given(), ids=lambda value: str(value)[:80])
def test_every_command_of_a_page_is_understood(
    page: str, words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its options exist and its values have the right form; files that it names need not exist."""
    monkeypatch.chdir(tmp_path)
    name, *rest = words
    if name == "train":
        recipe, overrides, options = split(rest, OptionWords(build_parser(), extra=("--set",)))
        settings = [one for one in overrides if not one.startswith("data=")]  # a file of the user's
        parse(launch_arguments(recipe, overrides, options, guards=load_recipe(recipe, settings).guards))
    elif name == "launch" and "help" not in rest:
        parse(rest)
    else:
        original = CommandParser.parse_args

        def stop(
            parser: CommandParser, arguments: Sequence[str] | None = None, *more: Any
        ) -> argparse.Namespace:
            original(parser, arguments, *more)
            raise ParsedError

        monkeypatch.setattr(CommandParser, "parse_args", stop)
        with contextlib.suppress(ParsedError):
            assert main(words) == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_that_a_sentence_names_exists(page: Path) -> None:
    """`grpo-run NAME` in the text, with or without options."""
    named = set(re.findall(r"`grpo-run ([a-z][a-z-]*)", page.read_text(encoding="utf-8")))
    assert named - set(COMMANDS) == set()


def test_a_command_that_does_not_exist_is_found() -> None:
    """The tests above can fail."""
    assert list(commands("```sh\ngrpo-run launch --no-such train.py  # why\n```\n")) == [
        ["launch", "--no-such", "train.py"]
    ]
    with pytest.raises(UsageError, match="no option --no-such"):
        parse(["--no-such", "train.py"])
