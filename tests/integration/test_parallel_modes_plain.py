"""The parallelism modes take effect on CPU ranks under plain torchrun, without grpo-run.

DDP, ZeRO-2, ZeRO-3 and FSDP 2 train the scripts of `tests/scripts` on two Gloo ranks, each with the
environment that `load_parallelism` computes from `tests/configs`. A run that lost its ranks and resumed from
a checkpoint at a rollout boundary must end with the weights of the undisturbed run. Tests of `grpo-run
launch` rely on this.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import warm
from support.partition import check_partition
from support.references import plain_ranks
from support.warm import QUIET

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.launch.accelerate import check_took_effect, load_parallelism

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = REPOSITORY / "tests" / "scripts"
TORCHRUN = Path(sys.executable).parent / "torchrun"
RANKS = 2
STEPS, SAVE_STEPS, LOST_AT_STEP = 6, 3, 5
DEADLINE_SECONDS = 120.0
OF_ACCELERATE = ("ACCELERATE_", "FSDP_", "KMP_", "NCCL_P2P", "NCCL_IB", "OMP_NUM_THREADS")
MODES = ("ddp", "zero2", "zero3", "fsdp2")


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to the repository's root: paths of DeepSpeed files in the configurations are relative to it."""
    monkeypatch.chdir(REPOSITORY)


def environment(mode: str, *, shim: bool = True) -> dict[str, str]:
    """Return a rank's environment in this mode."""
    parallelism = load_parallelism(
        Path("tests") / "configs" / f"{mode}.yaml",
        nproc_per_node=None,
        nnodes=1,
        has_accelerator=mode == "fsdp2",  # the shim makes it take effect
    )
    assert parallelism.ranks_per_node == RANKS
    return {
        **os.environ,
        **parallelism.environment,
        "CUDA_VISIBLE_DEVICES": "",
        **QUIET,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        **({"TEST_FSDP_ON_CPU": "1"} if mode == "fsdp2" and shim else {}),
    }


def torchrun(script: str, output_dir: Path, variables: dict[str, str], *extra: str) -> int:
    """Run the script on two ranks and return torchrun's exit code.

    Its output is printed for the test report.
    """
    command = [str(TORCHRUN), "--standalone", "--nproc-per-node", str(RANKS), str(SCRIPTS / script)]
    command += ["--output-dir", str(output_dir), "--cpu"]
    command += ["--max-steps", str(STEPS), "--save-steps", str(SAVE_STEPS), *extra]
    with subprocess.Popen(
        command, env=variables, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            printed, _ = process.communicate(timeout=DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun terminates its ranks
            printed, _ = process.communicate(timeout=DEADLINE_SECONDS)
            pytest.fail(f"{script} did not finish within {DEADLINE_SECONDS} s:\n{printed[-4000:]}")
    print(printed[-4000:])
    return process.returncode


def digest(output_dir: Path) -> str:
    return (output_dir / "weights.sha256").read_text().strip()


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_mode_takes_effect_and_a_resumed_run_ends_with_the_same_weights(mode: str, tmp_path: Path) -> None:
    """The model is partitioned as the mode specifies, and resuming at a rollout boundary is bit-exact."""
    variables = environment(mode)
    whole, lost = tmp_path / "whole", tmp_path / "lost"

    assert torchrun("grpo.py", whole, variables, "--record-partition") == 0
    ranks = [json.loads((whole / f"partition-rank{rank}.json").read_text()) for rank in range(RANKS)]
    for rank in ranks:
        check_partition(mode, rank)
    if mode == "fsdp2":
        assert sum(rank["local_elements"] for rank in ranks) == ranks[0]["elements"]

    assert torchrun("grpo.py", lost, variables, "--exit-at-step", str(LOST_AT_STEP)) != 0
    assert not (lost / "weights.sha256").exists()
    state = lost / f"checkpoint-{SAVE_STEPS}" / "trainer_state.json"
    written = state.stat().st_mtime_ns

    assert torchrun("grpo.py", lost, variables, "--resume") == 0
    assert state.stat().st_mtime_ns == written, "the run restarted instead of resuming"
    assert digest(lost) == digest(whole)


def test_fsdp_on_cpu_without_the_shim_is_ddp_and_is_detected(tmp_path: Path) -> None:
    """accelerate silently uses DDP; `check_took_effect` raises."""
    from accelerate.utils import DistributedType

    words = [str(SCRIPTS / "grpo.py"), "--output-dir", ".", "--cpu", "--max-steps", "2", "--record-partition"]
    plain_ranks(tmp_path, words, ranks=RANKS, environment=environment("fsdp2", shim=False))
    rank = json.loads((tmp_path / "partition-rank0.json").read_text())
    check_partition("ddp", rank)
    found = SimpleNamespace(
        distributed_type=DistributedType(rank["distributed_type"]), num_processes=rank["world_size"]
    )
    with pytest.raises(ConfigError, match="asks for FSDP, but accelerate uses MULTI_CPU"):
        check_took_effect("FSDP", found, world_size=RANKS)


@pytest.mark.parametrize("mode", MODES)
def test_environment_equals_accelerate_launch(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`load_parallelism` computes the environment that the real `accelerate launch` gives a rank."""
    for name in list(os.environ):
        if name.startswith(OF_ACCELERATE):
            monkeypatch.delenv(name)
    command = [str(TORCHRUN.with_name("accelerate")), "launch", "--main_process_port", "0"]
    command += ["--config_file", f"tests/configs/{mode}.yaml", str(SCRIPTS / "environment.py")]
    code, printed = warm.run(
        [*command, str(tmp_path / "{rank}.json")], cwd=REPOSITORY, environment=dict(os.environ), cold=False
    )
    assert code == 0, printed
    theirs = json.loads((tmp_path / "0.json").read_text())
    file = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
    if file in theirs:  # grpo-run uses the absolute path
        theirs[file] = str((REPOSITORY / theirs[file]).resolve())
    theirs.pop("KMP_AFFINITY", None)  # would pin all ranks to the same cores
    theirs = {name: value for name, value in theirs.items() if name.startswith(OF_ACCELERATE)}
    ours = load_parallelism(
        Path("tests") / "configs" / f"{mode}.yaml",
        nproc_per_node=None,
        nnodes=1,
        has_accelerator=mode == "fsdp2",
    ).environment
    if mode.startswith("zero"):  # torchrun's own default for several ranks, not accelerate's
        theirs.pop("OMP_NUM_THREADS")
    assert {name: value for name, value in ours.items() if name.startswith(OF_ACCELERATE)} == theirs


@pytest.mark.full
@pytest.mark.parametrize("script", ["rloo.py", "sft.py", "sft_then_grpo.py"])
def test_the_other_scripts_resume_exactly(script: str, tmp_path: Path) -> None:
    """RLOO, SFT and two trainers in one process resume exactly under DDP."""
    variables = environment("ddp")
    whole, lost = tmp_path / "whole", tmp_path / "lost"
    assert torchrun(script, whole, variables) == 0
    assert torchrun(script, lost, variables, "--exit-at-step", str(LOST_AT_STEP)) != 0
    assert torchrun(script, lost, variables, "--resume") == 0
    assert digest(lost) == digest(whole)
