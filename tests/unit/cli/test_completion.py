"""`grpo-run completion`: what real shells offer with the scripts."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_run.cli.completion import RUNS, words_of
from grpo_run.cli.main import COMMANDS, main

SECONDS = 60.0
BASH = """\
source "$1"; shift
complete -p grpo-run >/dev/null || exit 3
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _grpo_run
printf '%s\\n' "${COMPREPLY[@]}"
"""
FISH = 'source "$argv[1]"; complete -C "$argv[2..]" | string replace -r "\\t.*" ""'
ZSH = """\
autoload -U compinit; compinit -u -d $1.dump
source $1; shift
typed=("$@")
emulate -R ksh -c 'COMP_WORDS=("${typed[@]}"); COMP_CWORD=$((${#typed[@]} - 1)); _grpo_run
printf "%s\\n" "${COMPREPLY[@]}"'
"""
TAKE_A_RUN = {
    "resume", "status", "logs", "serve", "top", "report", "trace", "stop", "save", "checkpoints", "ledger",
    "replay",
}  # fmt: skip
Offered = Callable[..., list[str]]


@pytest.fixture(params=["bash", "zsh", "fish"])
def offered(request: pytest.FixtureRequest, here: Path, capsys: pytest.CaptureFixture[str]) -> Offered:
    """What a shell offers for a command line of which the last word is being typed."""
    shell = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert main(["completion", shell]) == 0
    script = here / "script"
    script.write_text(capsys.readouterr().out)

    def ask(*words: str) -> list[str]:
        program = {"bash": BASH, "fish": FISH, "zsh": ZSH}[shell]
        typed = ["grpo-run", *words]
        given = [" ".join(typed)] if shell == "fish" else typed
        name = [] if shell == "fish" else [shell]
        flags = {"bash": ["--norc", "--noprofile"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
        command = [shell, *flags, "-c", program, *name, str(script), *given]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        assert ran.stderr == ""
        offered = ran.stdout.split()  # of these, zsh itself takes what begins with the word
        return [one for one in offered if one.startswith(words[-1])] if shell == "zsh" else offered

    return ask


def test_shells_complete_commands_options_and_runs(offered: Offered, here: Path) -> None:
    """Of the commands' own declarations; a run is one of `runs/`."""
    for name in ("night-1", "noon-2"):
        (here / "runs" / name).mkdir(parents=True)
    assert set(offered("re")) == {"rehearse", "replay", "report", "resume"}
    assert set(offered("")) == {*COMMANDS, "help"}
    assert set(offered("help", "lo")) == {"logs"}
    assert set(offered("logs", "--fo")) == {"--follow"}
    assert set(offered("launch", "--show")) == {"--show-ranks"}
    assert set(offered("train", "--se")) == {"--set"}
    assert set(offered("train", "--show")) == {"--show-ranks"}
    assert set(offered("train", "arith")) == {"arithmetic"}
    assert set(offered("status", "n")) == {"night-1", "noon-2"}
    assert set(offered("stop", "no")) == {"noon-2"}
    assert set(offered("checkpoints", "ver")) == {"verify"}
    assert set(offered("report", "--format", "")) == {"html", "md", "json"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_declares_what_follows_it(command: str) -> None:
    """Its help at least; and a run, if it takes one."""
    words = words_of(command)
    assert "--help" in words["-"]
    assert (RUNS in words[""]) == (command in TAKE_A_RUN)
