"""`grpo-run completion bash|zsh|fish`: print what lets a shell complete commands, options and runs.

Made of the parsers of the commands, so a new option is completed as soon as it is declared. Runs are those in
`runs/` of the working directory; what no word is known for is completed as a file. Installs nothing.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence

from grpo_run.cli.command_parser import CommandParser
from grpo_run.trainers.recipes.recipe import packaged_recipes

RUNS = "(command ls runs 2>/dev/null)"
"""A command substitution of fish; with a dollar sign before it, of bash and zsh."""
HOW = {
    "bash": "# grpo-run completion bash > ~/.local/share/bash-completion/completions/grpo-run",
    "zsh": "# grpo-run completion zsh > ~/.grpo-run.zsh; in ~/.zshrc, after compinit: source ~/.grpo-run.zsh",
    "fish": "# grpo-run completion fish > ~/.config/fish/completions/grpo-run.fish",
}
"""First line of a script: where it goes."""


def main(arguments: Sequence[str]) -> int:
    """Print the script; returns 0."""
    description = "Print a completion script; its first line says where to write it."
    parser = CommandParser(prog="grpo-run completion", description=description)
    parser.add_argument("shell", choices=list(HOW), help="for which shell")
    shell = parser.parse_args(arguments).shell

    from grpo_run.cli.main import COMMANDS

    words = {command: words_of(command) for command in COMMANDS}
    words["train"] = words["launch"] | words["train"]
    words["train"]["-"] += words["launch"]["-"]
    words["train"][""] += packaged_recipes()
    words["help"] = {"": list(COMMANDS)}
    print(HOW[shell])
    print("\n".join(_fish(words) if shell == "fish" else _bash(words, zsh=shell == "zsh")))
    return 0


def words_of(command: str) -> dict[str, list[str]]:
    """Return what can follow an option that takes a value, by option, a dash, or anything else ("").

    The parsers are made as for the help of the command, which is not printed.
    """
    from grpo_run.cli.main import main as run

    CommandParser.made.clear()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        run([command, "--help"])
    found: dict[str, list[str]] = {"-": [], "": []}
    for action in [action for parser in CommandParser.made for action in parser._actions]:
        choices = [str(choice) for choice in action.choices or ()]
        names = [name for name in action.option_strings if "_" not in name]
        found["-"] += names
        if action.nargs != 0:
            found |= dict.fromkeys(names, choices)
        if not names:
            found[""] += [*choices, *([RUNS] if action.dest in ("run", "target") else [])]
    return found


def _bash(words: dict[str, dict[str, list[str]]], *, zsh: bool) -> list[str]:
    """Return the lines of a script for bash, or for its emulation in zsh."""
    cases = [
        f'{command}:{ {"-": "*:-*", "": "*"}.get(after, f"{after}:*") }) words="{" ".join(known)}" ;;'
        for command, ways in words.items()
        for after, known in sorted(ways.items(), key=lambda way: (way[0] in ("-", ""), way[0] == ""))
    ]
    return [
        *(["autoload -U +X bashcompinit && bashcompinit"] if zsh else []),
        "_grpo_run() {",
        "  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]}",
        f'  local words="{" ".join(words)}"',
        '  [ $COMP_CWORD = 1 ] || case "${COMP_WORDS[1]}:$prev:$cur" in',
        *(f"    {case.replace(RUNS, f'${RUNS}')}" for case in cases),
        "    *) words= ;;",
        "  esac",
        '  COMPREPLY=( $(compgen -W "$words" -- "$cur") )',
        "}",
        "complete -o default -F _grpo_run grpo-run",
    ]


def _fish(words: dict[str, dict[str, list[str]]]) -> list[str]:
    lines = [f"complete -c grpo-run -f -n __fish_use_subcommand -a '{' '.join(words)}'"]
    for command, ways in words.items():
        begin = f"complete -c grpo-run -n 'test (commandline -opc)[2] = {command} 2>/dev/null'"
        for option in ways.get("-", []):
            name = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            known = " ".join(ways.get(option, []))
            lines.append(f"{begin} {name}" + " -r" * (option in ways) + f" -f -a '{known}'" * bool(known))
        lines += [f"{begin} -a '{' '.join(ways[''])}'"] if ways[""] else []
    return lines
