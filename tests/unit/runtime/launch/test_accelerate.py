"""`--accelerate-config`: the environment of the ranks, and what is refused before any rank starts."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.utils import DistributedType

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.launch.accelerate import Parallelism, check_took_effect, load_parallelism

REPOSITORY = Path(__file__).parents[4]
CONFIGS = REPOSITORY / "tests" / "configs"


@pytest.fixture(autouse=True)
def _no_inherited_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_", "NCCL_", "KMP_")):
            monkeypatch.delenv(name)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.chdir(REPOSITORY)


def write(tmp_path: Path, text: str, name: str = "accelerate.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def load(path: Path, **changes: Any) -> Parallelism:
    wanted: dict[str, Any] = {"nproc_per_node": None, "nnodes": 1, "has_accelerator": False}
    return load_parallelism(path, **{**wanted, **changes})


def refusal(path: Path, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, **changes)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


DEEPSPEED = "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  zero_stage: 2\n"
FSDP2 = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 2\n"
CPU = "distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 2\n"


def test_importing_the_module_imports_neither_torch_nor_accelerate() -> None:
    """The supervisor imports the module even without a configuration file."""
    code = (
        "import sys, grpo_run.runtime.launch.accelerate;"
        " print([m for m in ('torch', 'accelerate', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "expected", "switch"),
    [
        ("ddp", "MULTI_CPU", {"ACCELERATE_USE_CPU": "True"}),
        ("zero2", "DEEPSPEED", {"ACCELERATE_USE_DEEPSPEED": "true"}),
        ("zero3", "DEEPSPEED", {"ACCELERATE_USE_DEEPSPEED": "true"}),
        ("fsdp2", "FSDP", {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}),
    ],
)
def test_each_mode_sets_its_variables_only(name: str, expected: str, switch: dict[str, str]) -> None:
    """Each of the four test configurations enables its own mode. A MASTER_PORT from the file would break the
    rendezvous of every restart, and KMP_AFFINITY is meant for one process per machine.
    """
    found = load(CONFIGS / f"{name}.yaml", has_accelerator=name == "fsdp2")
    assert (found.expected_distributed_type, found.ranks_per_node) == (expected, 2)
    switches = {
        key: value
        for key, value in found.environment.items()
        if key.startswith("ACCELERATE_USE_") or key == "FSDP_VERSION"
    }
    assert switches == switch
    others = {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "KMP_AFFINITY"}
    assert not others & set(found.environment)


def test_the_deepspeed_file_has_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that changes directory still finds it."""
    (tmp_path / "zero.json").write_text((CONFIGS / "zero2.json").read_text())
    path = write(
        tmp_path,
        "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  deepspeed_config_file:"
        " zero.json\n",
    )
    monkeypatch.chdir(tmp_path)
    assert load(path).environment["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == str(tmp_path / "zero.json")


@pytest.mark.parametrize("name", ["fsdp1", "fsdp2", "multi_gpu", "single_gpu", "zero1", "zero2", "zero3"])
def test_every_configuration_of_trl_is_accepted_unchanged(name: str) -> None:
    """A file that TRL ships is not refused on a machine that it was written for."""
    path = Path(str(files("trl"))) / "accelerate_configs" / f"{name}.yaml"
    found = load(path, has_accelerator=True)
    assert found.ranks_per_node == (1 if name == "single_gpu" else 8)
    assert found.environment["ACCELERATE_MIXED_PRECISION"] == "bf16"


@pytest.mark.parametrize("threads", ["1", "3"])
def test_the_thread_count_of_the_launcher_is_kept_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch, threads: str
) -> None:
    """As under `accelerate launch`; the environment holds only what has to be added, to be shown to the
    user.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert "OMP_NUM_THREADS" not in load(CONFIGS / "ddp.yaml").environment


# ranks


@pytest.mark.parametrize(
    ("text", "nproc_per_node", "nnodes", "ranks"),
    [
        (CPU, None, 1, 2),
        (CPU, 2, 1, 2),
        (CPU, 4, 1, 4),
        (CPU, 1, 2, 1),
        (CPU.replace("num_processes: 2", "num_processes: 8\nnum_machines: 2"), None, 2, 4),
        (CPU.replace("num_processes: 2\n", ""), 3, 1, 3),
        ("distributed_type: 'NO'\nnum_processes: 8\n", None, 1, 1),
    ],
)
def test_ranks_per_node(
    tmp_path: Path, text: str, nproc_per_node: int | None, nnodes: int, ranks: int
) -> None:
    """The command line's number, or else the file's total divided by the number of machines."""
    found = load(write(tmp_path, text), nproc_per_node=nproc_per_node, nnodes=nnodes)
    assert found.ranks_per_node == ranks


def test_one_process_for_several_ranks_is_refused(tmp_path: Path) -> None:
    """`accelerate launch` would start one process without a warning."""
    assert "NO trains in one process, 2 are requested" in refusal(
        write(tmp_path, "distributed_type: 'NO'\n"), nproc_per_node=2
    )


def test_too_few_processes_are_refused_with_both_numbers(tmp_path: Path) -> None:
    """Nobody has asked for fewer: a model that fits on eight ranks may not fit on four. The error names the
    file.
    """
    text = CPU.replace("num_processes: 2", "num_processes: 8\nnum_machines: 2")
    message = refusal(write(tmp_path, text))
    assert message.startswith("too few processes for the accelerate config: ")
    assert "num_processes 8" in message
    assert "is 4" in message
    assert "--nproc-per-node" in message


@pytest.mark.parametrize(
    ("nproc_per_node", "nnodes", "replaces"),
    [(2, 1, True), (16, 1, True), (8, 1, False), (4, 2, False), (4, 1, True), (None, 1, False)],
)
def test_the_command_line_wins_over_the_file_and_says_so(
    nproc_per_node: int | None, nnodes: int, replaces: bool
) -> None:
    """Of TRL's own file for 8 processes; one line, and none where the numbers agree."""
    path = Path(str(files("trl"))) / "accelerate_configs" / "fsdp2.yaml"
    found = load(path, has_accelerator=True, nproc_per_node=nproc_per_node, nnodes=nnodes)
    assert found.ranks_per_node == (nproc_per_node or 8)
    line = f"--nproc-per-node {nproc_per_node} replaces num_processes 8 of {path}"
    assert found.replaced == (line if replaces else "")


# malformed files


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("distributed_type: FSDP\nfsdp_config: [1\n", "a.yaml", "line 3"),
        ('{"distributed_type": "FSDP",\n "num_processes" 2}', "a.json", "line 2"),
        ("- MULTI_GPU\n", "a.yaml", "accelerate refuses it"),
        ("", "a.yaml", "accelerate refuses it"),
        ("num_processes: 2\n", "a.yaml", "A `distributed_type` must be specified"),
        ("distributed_type: NO\n", "a.yaml", "write it in quotes"),
        (CPU.replace("2", "two"), "a.yaml", "no number in num_processes"),
        (CPU.replace("2", "0"), "a.yaml", "no number in num_processes"),
        ("distributed_type: FSPD\n", "a.yaml", "'FSPD' is not a valid DistributedType"),
        ("distributed_type: MULTI_XPU\n", "a.yaml", "is not started by grpo-run launch"),
        (CPU + "compute_environment: AMAZON_SAGEMAKER\n", "a.yaml", "accelerate refuses it"),
        (CPU + "num_proceses: 2\n", "a.yaml", "num_proceses"),
        (CPU.replace("num_processes: 2\n", ""), "a.yaml", "use --nproc-per-node"),
        (
            DEEPSPEED + f"  deepspeed_config_file: {CONFIGS / 'zero2.json'}\n", "a.yaml",
            "accelerate refuses it: When using `deepspeed_config_file`",
        ),
        (
            DEEPSPEED.replace("zero_stage: 2", "deepspeed_config_file: none.json"), "a.yaml",
            "deepspeed_config_file none.json: no such file (from ",
        ),
        (CPU + "num_machines: 3\n", "a.yaml", "too few processes"),
        (CPU + "mixed_precision: bf61\n", "a.yaml", "Unknown mixed_precision mode: bf61"),
        (CPU + "mixed_precision: no\n", "a.yaml", "write it in quotes"),
    ],
)  # fmt: skip
def test_a_malformed_file_is_refused_in_one_line(tmp_path: Path, text: str, name: str, said: str) -> None:
    """The line names the file and what accelerate says; there is no traceback."""
    assert said in refusal(write(tmp_path, text, name))


def test_what_is_no_text_file_is_refused(tmp_path: Path) -> None:
    """A missing file, a folder, and a checkpoint that was passed by mistake."""
    assert "no such accelerate configuration file" in refusal(tmp_path / "none.yaml")
    assert "no such accelerate configuration file" in refusal(tmp_path)
    path = tmp_path / "a.yaml"
    path.write_bytes(b"distributed_type: FSDP\n\xff\xfe")
    assert "accelerate refuses it: 'utf-8' codec" in refusal(path)


# what would not take effect


@pytest.mark.parametrize(
    ("text", "has_accelerator", "said"),
    [
        (FSDP2, False, "every rank would hold the whole model (DDP)"),
        ("distributed_type: MULTI_GPU\nnum_processes: 2\n", False, "every rank would train alone"),
        (CPU + "deepspeed_config:\n  zero_stage: 2\n", False, "deepspeed_config.zero_stage"),
        (DEEPSPEED + "fsdp_config:\n  fsdp_version: 2\n", False, "fsdp_config.fsdp_version"),
        (CPU + "fp8_config:\n  fp8_backend: TE\n", False, "fp8_config.fp8_backend"),
        (DEEPSPEED.replace("zero_stage", "zero_stag"), False, "deepspeed_config.zero_stag"),
        (DEEPSPEED + "  offload_param_nvme_path: /nvme\n", False, "deepspeed_config.offload_param_nvme_path"),
        (DEEPSPEED + "dynamo_config:\n  dynamo_backend: INDUCTOR\n", False, "dynamo_config.dynamo_backend"),
        (FSDP2 + "  fsdp_offload_parms: true\n  fsdp_typo: 1\n", True, "fsdp_config.fsdp_typo"),
    ],
)
def test_a_setting_without_effect_is_refused(
    tmp_path: Path, text: str, has_accelerator: bool, said: str
) -> None:
    """accelerate ignores each of these settings silently. All of them are named."""
    message = refusal(write(tmp_path, text), has_accelerator=has_accelerator)
    assert "would not take effect" in message
    assert said in message


def test_fsdp_is_expected_in_the_ranks(tmp_path: Path) -> None:
    """On a node with an accelerator the file takes effect."""
    found = load(write(tmp_path, FSDP2), has_accelerator=True)
    assert found.expected_distributed_type == "FSDP"
    assert found.environment["ACCELERATE_USE_FSDP"] == "true"


# inside a rank


def accelerator(name: str, num_processes: int) -> SimpleNamespace:
    return SimpleNamespace(distributed_type=DistributedType(name), num_processes=num_processes)


def test_the_expected_type_is_accepted() -> None:
    """Nothing is raised if accelerate uses the mode of the file."""
    check_took_effect("FSDP", accelerator("FSDP", 2), world_size=2)
    check_took_effect("NO", accelerator("MULTI_GPU", 1))


@pytest.mark.parametrize(
    ("expected", "found", "processes", "said"),
    [
        ("FSDP", "MULTI_CPU", 2, "asks for FSDP, but accelerate uses MULTI_CPU"),
        ("DEEPSPEED", "DEEPSPEED", 1, "2 rank(s) were started, but accelerate counts 1"),
        ("NO", "MULTI_GPU", 2, "1 rank(s) were started, but accelerate counts 2"),
    ],
)
def test_another_mode_inside_a_rank_is_an_error(expected: str, found: str, processes: int, said: str) -> None:
    """A run that is not sharded as configured must not start its first step."""
    with pytest.raises(ConfigError, match="did not take effect") as caught:
        check_took_effect(expected, accelerator(found, processes), world_size=2)
    assert said in str(caught.value)
