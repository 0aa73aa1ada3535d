"""The process in which a script runs until its first `train()`, to tell `grpo-run plan` what it would train.

Started by `script.py` as `python -m`, with a deadline. `Trainer.train` is replaced in this process: it
writes what the live trainer says into a file and ends the process. Trains nothing and loads no weights.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pydantic
import wrapt

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.memory.facts import MemoryFacts
from grpo_run.runtime.planning.computation import Computation, computation_of
from grpo_run.runtime.processes.starting import die_with_parent
from grpo_run.runtime.rank.memory_facts import collect_facts
from grpo_run.runtime.rank.trainer_facts import REPLICATED, TrainerFacts
from grpo_run.runtime.upstream import unloaded

MAX_SECONDS = 120
"""How long a script may take to reach its first `train()`."""
WHOLE = ("deepspeed", "fsdp")
"""Settings of a trainer of which only counts whether they are set."""


class ScriptReply(pydantic.BaseModel):
    """What the process has found: facts, or why there are none.

    Attributes:
        facts: of the trainer whose `train()` the script called first.
        computation: how it computes its model.
        settings: of its arguments: plain values, by name.
        own_optimizer: the script gives the trainer an optimizer.
        reward_models: a model computes rewards.
        problem: why the script did not get to `train()`, as a clause; empty if it did.
        exited: the script ended itself; what it printed last may say why.
    """

    facts: MemoryFacts | None = None
    computation: Computation = Computation()
    settings: dict[str, Any] = {}
    own_optimizer: bool = False
    reward_models: bool = False
    problem: str = ""
    exited: bool = False


def main() -> None:
    """Run the script that the command line names: file of the reply, ranks, a Python file or the name of a
    module, arguments of the script.
    """
    die_with_parent(os.getppid())
    reply_file, ranks, script, *arguments = sys.argv[1:]
    reply = Path(reply_file)
    sys.argv = [script, *arguments]
    of_file = script.endswith(".py")
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)) if of_file else os.getcwd())

    def answer(trainer: Any, *args: Any, **kwargs: Any) -> NoReturn:
        try:
            _end(reply, _reply_of(trainer, int(ranks)))
        except Exception as error:  # noqa: BLE001  the trainer is the script's; the user is told
            _end(reply, ScriptReply(problem=f"its trainer cannot be read: {_said(error)}"))

    def replace_train(module: Any) -> None:
        module.Trainer.train = answer

    wrapt.register_post_import_hook(replace_train, "transformers.trainer")
    try:
        unloaded.prepare(int(ranks))
        if of_file:
            runpy.run_path(script, run_name="__main__")
        else:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
    except BaseException as error:  # noqa: BLE001  whatever the script raises, SystemExit too
        _end(reply, ScriptReply(problem=_problem(error, script), exited=isinstance(error, SystemExit)))
    _end(reply, ScriptReply(problem="it ends without a call of Trainer.train()"))


def _end(path: Path, reply: ScriptReply) -> NoReturn:
    """Write the reply, and end without the script's own cleanup."""
    path.write_text(reply.model_dump_json(), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _reply_of(trainer: Any, ranks: int) -> ScriptReply:
    arguments = trainer.args
    settings = {
        name: value
        for name, value in vars(arguments).items()
        if not name.startswith("_") and isinstance(value, (bool, int, float, str, type(None)))
    }
    known = replace(TrainerFacts.of(trainer, ranks), layout=REPLICATED)
    facts = collect_facts(trainer, known)
    return ScriptReply(
        facts=facts,
        computation=computation_of(trainer),
        settings={**settings, **{name: bool(getattr(arguments, name, None)) for name in WHOLE}},
        own_optimizer=getattr(trainer, "optimizer", None) is not None,
        reward_models=any(hasattr(one, "parameters") for one in getattr(trainer, "reward_funcs", ())),
    )


def _problem(error: BaseException, script: str) -> str:
    """Return how a script ended, and in which of its lines, as a clause."""
    lines = [one.lineno for one in traceback.extract_tb(error.__traceback__) if one.filename == script]
    where = f"line {lines[-1]}" if lines else "it"
    if isinstance(error, SystemExit):
        return f"{where} exits with {error.code!r}"
    return str(error) if isinstance(error, ConfigError) else f"{where} raises {_said(error)}"


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".removesuffix(": ")


if __name__ == "__main__":
    main()
