"""`--accelerate-config`: the environment of the ranks, and what is refused before any rank starts."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.utils import DistributedType
from support.transcripts import Story, stories

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.launch.accelerate import Parallelism, check_took_effect, load_parallelism

REPOSITORY = Path(__file__).parents[4]
CONFIGS = REPOSITORY / "tests" / "configs"
TRLS = Path(str(files("trl"))) / "accelerate_configs"


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


class ConfigurationShell:
    """A directory, HERE in answers, and what becomes of a configuration file in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def text(self, content: str, *, name: str = "a.yaml", **options: str) -> str:
        """Write a file, and load it. `CONFIGS` is the folder of the tests' own files."""
        content = content.replace("\\n", "\n").replace("CONFIGS", str(CONFIGS))
        (self.folder / name).write_bytes(content.encode("latin-1"))
        return self.load(name, **options)

    def load(self, name: str, *, accelerator: str = "", show: str = "", **ranks: str) -> str:
        """The ranks of a node and their mode, or what is refused.

        Args:
            name: of a file; `TRL/` is the folder of TRL's own.
            accelerator: the machine has one.
            show: a variable of the ranks.
        """
        path = TRLS / name[4:] if name.startswith("TRL/") else self.folder / name
        counts = {key: int(value) for key, value in ranks.items()}
        try:
            found = load(path, has_accelerator=bool(accelerator), **counts)
        except ConfigError as error:
            return self._here(str(error))
        words = [f"{found.ranks_per_node} ranks, {found.expected_distributed_type}"]
        words += [f"{show} {found.environment[show]}"] if show else []
        return self._here("\n".join([*words, *([found.replaced] if found.replaced else [])]))

    def _here(self, text: str) -> str:
        for path, name in (
            (self.folder, "HERE"),
            (CONFIGS, "CONFIGS"),
            (TRLS, "TRL"),
            (REPOSITORY, "CURRENT"),
        ):
            text = text.replace(str(path), name)
        return text


@stories(__file__, "accelerate.txt")
def test_configurations(story: Story, word: str) -> None:
    """Every story of the file, in a folder with a short name: reasons are cut, and have names of files."""
    with tempfile.TemporaryDirectory() as folder:
        story.check(ConfigurationShell(Path(folder)), word)


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
    path = TRLS / f"{name}.yaml"
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
