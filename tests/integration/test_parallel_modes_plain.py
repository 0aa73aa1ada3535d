"""The environment of DDP, ZeRO-2, ZeRO-3 and FSDP 2 that `load_parallelism` computes is accelerate's, and a
mode that does not take effect is detected.

That each mode partitions the model is tested in `tests/fault/test_parallel_modes.py`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import warm
from support.partition import check_partition
from support.references import plain_ranks
from support.runs import BIN, SCRIPTS

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.launch.accelerate import check_took_effect, load_parallelism

REPOSITORY = Path(__file__).parents[2]
RANKS = 2
OF_ACCELERATE = ("ACCELERATE_", "FSDP_", "KMP_", "NCCL_P2P", "NCCL_IB", "OMP_NUM_THREADS")


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to the repository's root: paths of DeepSpeed files in the configurations are relative to it."""
    monkeypatch.chdir(REPOSITORY)


def environment(mode: str) -> dict[str, str]:
    """Return the variables that we compute for a mode."""
    parallelism = load_parallelism(
        Path("tests") / "configs" / f"{mode}.yaml", nproc_per_node=None, nnodes=1,
        has_accelerator=mode == "fsdp2",  # the shim makes it take effect
    )  # fmt: skip
    assert parallelism.ranks_per_node == RANKS
    return parallelism.environment


def test_fsdp_on_cpu_without_the_shim_is_ddp_and_is_detected(tmp_path: Path) -> None:
    """accelerate silently uses DDP; `check_took_effect` raises."""
    from accelerate.utils import DistributedType

    words = [str(SCRIPTS / "grpo.py"), "--output-dir", ".", "--cpu", "--max-steps", "2", "--record-partition"]
    plain_ranks(
        tmp_path, words, ranks=RANKS, environment={**environment("fsdp2"), "CUDA_VISIBLE_DEVICES": ""}
    )
    rank = json.loads((tmp_path / "partition-rank0.json").read_text())
    check_partition("ddp", rank)
    found = SimpleNamespace(
        distributed_type=DistributedType(rank["distributed_type"]), num_processes=rank["world_size"]
    )
    with pytest.raises(ConfigError, match="asks for FSDP, but accelerate uses MULTI_CPU"):
        check_took_effect("FSDP", found, world_size=RANKS)


@pytest.mark.parametrize(
    "mode", ["zero2", "fsdp2", *(pytest.param(mode, marks=pytest.mark.full) for mode in ("ddp", "zero3"))]
)
def test_environment_equals_accelerate_launch(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`load_parallelism` computes the environment that the real `accelerate launch` gives a rank."""
    for name in list(os.environ):
        if name.startswith(OF_ACCELERATE):
            monkeypatch.delenv(name)
    command = [str(BIN / "accelerate"), "launch", "--main_process_port", "0"]
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
    ours = environment(mode)
    if mode.startswith("zero"):  # torchrun's own default for several ranks, not accelerate's
        theirs.pop("OMP_NUM_THREADS")
    assert {name: value for name, value in ours.items() if name.startswith(OF_ACCELERATE)} == theirs
