"""Scenarios as data: text files of commands, each followed by what it answers, as in a terminal.

A file has one story after another. A story is a title after `==`, a sentence or two on why it is so, and
commands after `>`. A command is a method of the test's shell with its arguments: `> rank past gather exited`
calls `shell.rank("past", "gather", "exited")`, and `name=value` is a keyword argument. What the method
returns is the text that follows; a method that returns None answers nothing. A line `@ phase data reward`
repeats the story with each of these words in place of `$phase`.

With UPDATE_TRANSCRIPTS=1 in the environment the tests write the answers into the files instead: read the
difference before it is committed.
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import pytest

UPDATE = "UPDATE_TRANSCRIPTS" in os.environ


@dataclass(kw_only=True)
class Story:
    """One story of a file. `exchanges` are its commands with the expected answers."""

    file: Path
    title: str
    repeats: str = ""
    words: tuple[str, ...] = ()
    exchanges: list[tuple[str, list[str]]] = field(default_factory=list)

    def check(self, shell: object, word: str = "") -> None:
        """Run the commands on a new shell; fail where an answer differs.

        Args:
            word: takes the place of what the story repeats.
        """
        expected, found = [], []
        for command, answer in self.exchanges:
            said = run(shell, self._with(word, command))
            expected += [f"> {command}", *(self._with(word, line) for line in answer)]
            found += [f"> {command}", *said]
            if UPDATE and word in ("", *self.words[:1]):
                answer[:] = [self._without(word, line) for line in said]
        if UPDATE:
            _write(self)
        else:
            assert found == expected, f"{self.file.name}: {self.title} {word}"

    def _with(self, word: str, text: str) -> str:
        return text.replace(f"${self.repeats}", word) if self.repeats else text

    def _without(self, word: str, text: str) -> str:
        # a number also stands for other things
        word_is_telling = bool(self.repeats) and not word.isdigit()
        return re.sub(rf"\b{re.escape(word)}\b", f"${self.repeats}", text) if word_is_telling else text


def run(shell: object, command: str) -> list[str]:
    """Call the shell's method; return the lines of its answer."""
    verb, *words = shlex.split(command)
    named = {word: re.match(r"(\w+)=(.*)", word) for word in words}
    answer = getattr(shell, verb)(
        *(word for word in words if not named[word]), **{one[1]: one[2] for one in named.values() if one}
    )
    return [] if answer is None else [line.rstrip() for line in str(answer).splitlines()]


def read(file: Path) -> list[Story]:
    """Return the stories of a file, in order."""
    stories: list[Story] = []
    for line in file.read_text().splitlines():
        if line.startswith("== "):
            assert all(story.title != line[3:] for story in stories), f"{file.name}: twice: {line}"
            stories.append(Story(file=file, title=line[3:]))
        elif line.startswith("@ "):
            stories[-1].repeats, *words = line[2:].split()
            stories[-1].words = tuple(words)
        elif line.startswith("> "):
            stories[-1].exchanges.append((line[2:], []))
        elif line and stories and stories[-1].exchanges:
            stories[-1].exchanges[-1][1].append(line)
    return stories


def stories(test_file: str, *names: str) -> pytest.MarkDecorator:
    """Parametrize a test with `story` and `word`, for every story of these files beside it."""
    return pytest.mark.parametrize(
        ("story", "word"),
        [
            pytest.param(story, word, id=f"{story.title} {word}".strip())
            for name in names
            for story in read(Path(test_file).with_name(name))
            for word in story.words or ("",)
        ],
    )


def _write(changed: Story) -> None:
    """Write the answers of one story into its file."""
    before, title, rest = changed.file.read_text().partition(f"== {changed.title}\n")
    block, end, after = rest.partition("\n== ")
    lines = [block.partition("> ")[0]]
    lines += (f"> {command}\n" + "".join(f"{line}\n" for line in said) for command, said in changed.exchanges)
    changed.file.write_text(before + title + "".join(lines) + end + after)
