"""`grpo-run completion bash|zsh|fish`: print what lets a shell complete commands, options and runs.

Made of the parsers of the commands, so a new option is completed as soon as it is declared. Runs are those in
`runs/` of the working directory; what no word is known for is completed as a file. Installs nothing.
"""

from __future__ import annotations

import contextlib
import io
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from grpo_run.cli.command_parser import CommandParser
from grpo_run.trainers.recipes.recipe import packaged_recipes

RUNS = "command ls runs 2>/dev/null"
TAKE_LAUNCH_OPTIONS = ("train",)
HOW = {
    "bash": "# grpo-run completion bash > ~/.local/share/bash-completion/completions/grpo-run",
    "zsh": "# grpo-run completion zsh > ~/.grpo-run.zsh; in ~/.zshrc, after compinit: source ~/.grpo-run.zsh",
    "fish": "# grpo-run completion fish > ~/.config/fish/completions/grpo-run.fish",
}
"""First line of a script: where it goes."""


@dataclass(kw_only=True)
class Words:
    """What can follow a command.

    Attributes:
        options: with their help.
        values: of options that have few, by option.
        plain: words that are no options.
        runs: whether a run can be named.
    """

    options: dict[str, str] = field(default_factory=dict)
    values: dict[str, list[str]] = field(default_factory=dict)
    plain: list[str] = field(default_factory=list)
    runs: bool = False


def main(arguments: Sequence[str]) -> int:
    """Print the script; returns 0."""
    parser = CommandParser(
        prog="grpo-run completion",
        description="Print a completion script; its first line says where to write it.",
    )
    parser.add_argument("shell", choices=list(HOW), help="for which shell")
    shell = parser.parse_args(arguments).shell

    from grpo_run.cli.main import COMMANDS

    words = {command: words_of(command) for command in COMMANDS}
    for command in TAKE_LAUNCH_OPTIONS:
        words[command].options |= words["launch"].options
        words[command].values |= words["launch"].values
        words[command].plain = list(packaged_recipes())
    print(HOW[shell])
    print(_fish(words, COMMANDS) if shell == "fish" else _bash(words, zsh=shell == "zsh"))
    return 0


def words_of(command: str) -> Words:
    """Return what the parsers of a command declare: they are made as for its help, which is not printed."""
    from grpo_run.cli.main import main as run

    found = Words()
    with (
        CommandParser.noted() as parsers,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.suppress(SystemExit),
    ):
        run([command, "--help"])
    for action in (action for parser in parsers for action in parser._actions):
        choices = [str(choice) for choice in action.choices or ()]
        names = [name for name in action.option_strings if "_" not in name]
        for name in names:
            found.options.setdefault(name, (action.help or "").partition(";")[0].partition(" (default")[0])
            if action.nargs != 0:
                found.values[name] = choices
        if not names:
            found.plain += choices
            found.runs |= action.dest in ("run", "target")
    return found


def _bash(words: dict[str, Words], *, zsh: bool) -> str:
    """Return a script for bash, or for its emulation in zsh."""
    cases = []
    for command, known in words.items():
        for values in {tuple(one) for one in known.values.values()}:
            options = [option for option, one in known.values.items() if tuple(one) == values]
            pattern = "|".join(f"{command}:{option}:*" for option in options)
            cases.append(f"{pattern}) words={shlex.quote(' '.join(values))} ;;")
        cases.append(f"{command}:*:-*) words={shlex.quote(' '.join(known.options))} ;;")
        runs = f'" $({RUNS})"' if known.runs else ""
        cases.append(f"{command}:*) words={shlex.quote(' '.join(known.plain))}{runs} ;;")
    lines = [
        "autoload -U +X bashcompinit && bashcompinit" if zsh else "",
        "_grpo_run() {",
        "  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} words=''",
        f"  if [ $COMP_CWORD = 1 ]; then words={shlex.quote(' '.join([*words, 'help']))}",
        '  else case "${COMP_WORDS[1]}:$prev:$cur" in',
        *(f"    {case}" for case in cases),
        f"    help:*) words={shlex.quote(' '.join(words))} ;;",
        "  esac; fi",
        '  COMPREPLY=( $(compgen -W "$words" -- "$cur") )',
        "}",
        "complete -o default -F _grpo_run grpo-run",
    ]
    return "\n".join(filter(None, lines))


def _fish(words: dict[str, Words], commands: Mapping[str, str]) -> str:
    lines = [
        f"complete -c grpo-run -f -n __fish_use_subcommand -a {name} -d {_quoted(text)}"
        for name, text in {**commands, "help": "describe a command"}.items()
    ]
    lines.append(f"complete -c grpo-run -f -n '__fish_seen_subcommand_from help' -a '{' '.join(words)}'")
    for command, known in words.items():
        begin = f"complete -c grpo-run -n 'test (commandline -opc)[2] = {command} 2>/dev/null'"
        for option, text in known.options.items():
            kind = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            values = known.values.get(option)
            value = "" if values is None else f" -r -f -a '{' '.join(values)}'" if values else " -r"
            lines.append(f"{begin} {kind}{value} -d {_quoted(text)}")
        if known.plain or known.runs:
            runs = [f"({RUNS})"] if known.runs else []
            lines.append(f"{begin} -a '{' '.join([*known.plain, *runs])}'")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """A word of fish, which knows no other escapes within quotes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
