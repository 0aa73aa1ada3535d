"""Every shell command of the README and of the guides is run as it stands there, in a directory that has what
it names: scripts, configurations, a run that has finished after two faults, and a run that trains.

What is changed before: `RUN` is the run that has finished, of ten steps, and there are two ranks in place of
four, seven or eight. vLLM is the stand-in server. `NOT_HERE` lists the commands that need what a CPU machine
has not.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.import_graph import REPOSITORY
from support.rollout_server.starting import PROGRAM, command
from support.runs import BIN, CONFIGS, QUIET, SCRIPTS
from support.terminals import terminal

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs" / "guide").glob("*.md"))]
SECONDS = 400.0
NOT_HERE = {
    "pip install": "needs a package index",
    "docker compose": "needs Docker",
    "srun": "needs Slurm",
    "sbatch": "needs Slurm",
    "ssh -L": "needs a second machine",
    "--nproc-per-node gpu": "needs GPUs",
    "fsdp2.yaml": "needs GPUs: accelerate refuses FSDP on a CPU",
    "node0:29500": "needs four machines",
    "SKYPILOT": "needs SkyPilot and several machines",
    "memgen-gsm8k --nproc-per-node 4": "needs the weights of Qwen2.5-1.5B-Instruct",
    "path/to/gsm8k": "needs the data of GSM8K",
    "memgen-arithmetic": "takes minutes on idle cores; `test_memgen_arithmetic.py` runs the recipe",
    "rloo_memory.py": "takes hours on a CPU",
}
"""Parts of commands that cannot be run here, and why."""
ACTIVE = ("grpo-run stop", "grpo-run save", "grpo-run top", "grpo-run serve", "grpo-run resume")
"""Commands that are given while a run trains; the last one, when it has been stopped."""
TRAIN = f"""
import os, sys
from pathlib import Path
sys.path[:0] = [{str(SCRIPTS)!r}]
name = Path("which").read_text()
lr = sys.argv[sys.argv.index("--lr") + 1] if "--lr" in sys.argv else "1e-3"
more = Path("words").read_text().split()
sys.argv = ["train.py", "--output-dir", "out", "--cpu", "--learning-rate", lr, *more]
__import__(name).main()
"""
MODEL = """
from examples.tiny import tiny
model, tokenizer = tiny("0123456789>")
tokenizer.chat_template = "{% for one in messages %}{{ one.content }}{% endfor %}"
model.config.max_position_embeddings = 4096
tokenizer.save_pretrained("my-model")
model.save_pretrained("my-model")
"""
GRPO_YAML = """
model_name_or_path: ./my-model
dataset_name: ./prompts
reward_funcs: [think_format_reward]
output_dir: out-trl
max_steps: 3
num_generations: 4
per_device_train_batch_size: 4
max_completion_length: 8
use_cpu: true
bf16: false
report_to: none
"""


def commands() -> list[tuple[str, str]]:
    """Every command with its page, in the order of the pages, each once; continued lines are one."""
    found: dict[tuple[str, str], None] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"^```sh\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
            for line in re.sub(r" *\\\n *", " ", block).splitlines():
                if words := re.sub(r"\s+#\s.*", "", line).strip():
                    found[str(page.relative_to(REPOSITORY)), words] = None
    return list(found)


def why_not(words: str) -> str | None:
    """Return why a command cannot be run here; None if it can."""
    return next((reason for part, reason in NOT_HERE.items() if part in words), None)


def environment(folder: Path) -> dict[str, str]:
    """Return the variables of a user whose home and programs are in a folder."""
    own = {
        "PATH": f"{folder / 'bin'}:{BIN}:{os.environ['PATH']}",
        "HOME": str(folder / "home"),
        "PYTHONPATH": str(REPOSITORY / "tests"),
        "XDG_STATE_HOME": str(folder / "state"),
    }
    return {**os.environ, **QUIET, **own}


def furnish(folder: Path) -> None:
    """Write what the commands name: scripts, configurations, a model, hooks, and a program `vllm`."""
    shutil.copytree(REPOSITORY / "examples", folder / "examples")
    (folder / "train.py").write_text(TRAIN)
    (folder / "words").write_text("--max-steps 10 --save-steps 5")
    (folder / "which").write_text("grpo")
    for name in ("zero3.yaml", "zero3.json"):
        text = (CONFIGS / name).read_text()
        (folder / name).write_text(text.replace("tests/configs/", ""))
    (folder / "fixed.py").write_text("def overlap(completions, **columns): return [1.0] * len(completions)\n")
    (folder / "prompts").mkdir()
    rows = [json.dumps({"prompt": [{"role": "user", "content": f"{number}>"}]}) for number in range(64)]
    (folder / "prompts" / "train.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "grpo.yaml").write_text(GRPO_YAML)
    (folder / "home" / ".config").mkdir(parents=True)
    for name in ("night-hook", "night-ping", "grpo-hook"):
        (folder / "home" / ".config" / name).write_text("http://127.0.0.1:9/hook\n")
        (folder / "home" / ".config" / name).chmod(0o600)
    command(folder, 0)  # writes the server's model
    (folder / "bin").mkdir()
    vllm = folder / "bin" / "vllm"
    vllm.write_text(f'#!/bin/bash\nexec {sys.executable} {PROGRAM} serve {folder / "base"} "${{@:3}}"\n')
    vllm.chmod(0o700)
    subprocess.run(
        [sys.executable, "-c", MODEL], cwd=folder, env=environment(folder), check=True, timeout=SECONDS
    )


def shell(folder: Path, words: str, code: int = 0) -> str:
    """Run a command in a shell, as it is typed, and return what it has printed."""
    ran = subprocess.run(
        ["bash", "-c", words], cwd=folder, env=environment(folder), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert ran.returncode == code, f"{words}: {ran.returncode}\n{ran.stdout[-3000:]}{ran.stderr[-3000:]}"
    return ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run that has finished after two faults."""
    folder = tmp_path_factory.mktemp("finished")
    furnish(folder)
    faults = "--inject kill@rank1:step4 --inject kill@rank0:step7"
    launch = f"grpo-run launch --nproc-per-node 2 --run-id night --snapshot-every 2 {faults} train.py"
    assert "2 faults recovered" in shell(folder, launch)
    return folder


@contextlib.contextmanager
def training(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run that trains in a furnished folder until it is asked to stop."""
    (folder / "words").write_text("--max-steps 4000 --save-steps 50 --step-seconds 0.3 --prompts 64")
    launch = [str(BIN / "grpo-run"), "launch", "--nproc-per-node", "2", "--run-id", "live", "train.py"]
    with (folder / "live.out").open("w") as out:
        process = subprocess.Popen(launch, cwd=folder, env=environment(folder), stdout=out, stderr=out)
    try:
        journal, deadline = folder / "runs" / "live" / "journal.jsonl", time.monotonic() + SECONDS
        while not (journal.exists() and "step_committed" in journal.read_text()):
            assert process.poll() is None, (folder / "live.out").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(60)


def adapted(words: str) -> str:
    """Return a command as this machine runs it."""
    words = words.replace("RUN", "night").replace("4117", "10")
    words = re.sub(r"--nproc-per-node [478]\b", "--nproc-per-node 2", words)
    return re.sub(r"--num_processes 8", "--num_processes 2", words)


def beside_training(folder: Path, words: str) -> None:
    """Give a command to a run that trains, and see that it has done what it says."""
    with training(folder) as live:
        if words == "grpo-run top":
            with terminal([str(BIN / "grpo-run"), "top"], folder) as (shown, _):
                shown.wait(lambda text: "live" in text and "step" in text, seconds=SECONDS)
                shown.type(b"q")
        elif words == "grpo-run serve":
            server = subprocess.Popen(
                ["bash", "-c", f"exec {words}"],
                cwd=folder,
                env=environment(folder),
                stdout=subprocess.PIPE,
                text=True,
            )
            assert server.stdout is not None
            assert "live page on http://" in server.stdout.readline()
            server.send_signal(signal.SIGINT)
            server.wait(60)
        elif words.startswith("grpo-run save"):
            assert Path(shell(folder, words).strip().splitlines()[-1]).is_dir()
        else:
            shell(folder, "grpo-run stop")
            assert live.wait(SECONDS) == 75
            if "resume" in words:
                (folder / "words").write_text("--max-steps 4000 --save-steps 50 --prompts 64")
                resumed = subprocess.Popen(
                    ["bash", "-c", f"exec {words.replace('night', 'live')}"], cwd=folder,
                    env=environment(folder), stderr=subprocess.PIPE, text=True,
                )  # fmt: skip
                assert resumed.stderr is not None
                assert any("resumes from" in line for line in resumed.stderr)
                resumed.send_signal(signal.SIGTERM)
                assert resumed.wait(SECONDS) == 75


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("page", "words"),
    [one for one in commands() if why_not(one[1]) is None],
    ids=lambda value: str(value)[:90],
)
def test_a_documented_command_does_its_work(page: str, words: str, finished: Path, tmp_path: Path) -> None:
    """It exits with 0, or with what the page says."""
    words = adapted(words)
    if words.startswith((". ", "python3 -m venv")):
        shell(tmp_path, f"python3 -m venv --without-pip .venv && {words}")
        return
    if words.startswith(ACTIVE):
        furnish(tmp_path)
        beside_training(tmp_path, words)
        return
    if re.match(r"grpo-run (launch|train|plan)|torchrun|accelerate|trl", words):
        furnish(tmp_path)
        if "vllm serve" in words:
            (tmp_path / "which").write_text("server_grpo")
        printed = shell(tmp_path, words)
        if words.startswith("grpo-run launch"):
            assert "Finished at step" in printed
            assert ("1 fault recovered" in printed) == ("--inject" in words)
        return
    assert shell(finished, words).strip()


def test_every_reason_is_needed() -> None:
    """A row of the table that fits no command is out of date; most commands are run."""
    given = commands()
    assert [part for part in NOT_HERE if not any(part in words for _, words in given)] == []
    assert sum(why_not(words) is None for _, words in given) > len(given) / 2
