"""Read a job from a training script, the user's or TRL's: run it until its first `train()`, and take what its
trainer says. Called by `cli/plan.py`.

The script runs in a process of its own (`_script_process.py`), without weights, trackers, a GPU or an engine
of vLLM.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from grpo_run.cli.planning._script_process import MAX_SECONDS, ScriptReply
from grpo_run.cli.planning.sources import JobSource
from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.memory.facts import MemoryFacts
from grpo_run.runtime.planning.computation import refusals

PROCESS = "grpo_run.cli.planning._script_process"
QUIET = {
    "CUDA_VISIBLE_DEVICES": "",
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "SWANLAB_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment of the process: no GPU, and trackers that send nothing."""
OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
INSTEAD = "give --model and sizes instead of the script"


def read_script(script: str, arguments: Sequence[str] = (), ranks: int = 1) -> JobSource:
    """Return what a script would train first.

    Args:
        script: path of a Python file, or name of a module.
        arguments: of its command line.
        ranks: that it is to see.

    Raises:
        ConfigError: it does not reach a `train()`, or trains what is not covered.
    """
    reply = _run(script, arguments, ranks)
    facts = reply.facts
    if facts is None:
        raise ConfigError(f"{script} did not reach a train() that plan can read: {reply.problem}; {INSTEAD}")
    how = reply.computation
    if reasons := list(refusals(facts, how)):
        raise ConfigError(f"{script} trains what plan does not cover: {'; '.join(reasons)}; {INSTEAD}")
    source = JobSource(
        settings={
            **reply.settings,
            "dtype": how.weights,
            "attention": how.attention,
            "optim": how.optimizer,
            "gradient_checkpointing": facts.gradient_checkpointing,
            "model": how.configuration.get("_name_or_path") or f"the model of {Path(script).name}",
        },
        algorithm=facts.trainer,
        lora_rank=how.lora_rank,
        lora_targets=how.lora_targets,
        lora_dropout=how.lora_dropout,
        configuration=how.configuration,
    )
    source.notes += _notes(reply, facts)
    return source


def _notes(reply: ScriptReply, facts: MemoryFacts) -> Iterator[str]:
    if reply.own_optimizer:
        yield "The script's own optimizer is not followed: the one of the configuration is traced."
    if facts.generates == "script":
        yield "The script's own rollout function is not followed: generation by the trainer is traced."
    if reply.reward_models:
        yield "The memory of the reward model is not counted."


def _run(script: str, arguments: Sequence[str], ranks: int) -> ScriptReply:
    environment = {name: value for name, value in os.environ.items() if name not in OF_RANKS} | QUIET
    if ranks > 1:
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        environment |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    with tempfile.TemporaryDirectory(prefix="grpo-run-plan-") as folder:
        answered, printed = Path(folder) / "reply", Path(folder) / "output"
        command = [sys.executable, "-P", "-m", PROCESS, str(answered), str(ranks), script, *arguments]
        with open(printed, "wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        try:
            code = process.wait(MAX_SECONDS)
        except subprocess.TimeoutExpired:
            return ScriptReply(problem=f"it took longer than {MAX_SECONDS} s")
        finally:
            with contextlib.suppress(ProcessLookupError):  # nothing of it is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if answered.exists():
            reply = ScriptReply.model_validate_json(answered.read_bytes())
        else:
            reply = ScriptReply(problem=f"its process ended with {code}", exited=True)
        if reply.exited:
            last = printed.read_text(errors="replace").strip().rpartition("\n")[2][:200]
            reply.problem = f"{reply.problem}: {last}".removesuffix(": ")
        return reply
