"""Read an accelerate configuration file, as `accelerate launch --config_file FILE` would.

`read` returns an `AccelerateFile`, or an error with the file, the line or key, and what to write instead.
Called by `accelerate.load_parallelism` only. Imports neither torch nor accelerate. Does not check whether
settings take effect (`accelerate_effect`) and does not compute the environment (`accelerate_environment`).
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError

from grpo_run.runtime.errors import ConfigError

LAUNCHABLE: Final = {
    "NO": "no",
    "MULTI_CPU": "ddp",
    "MULTI_GPU": "ddp",
    "FSDP": "fsdp",
    "DEEPSPEED": "deepspeed",
}
"""accelerate's `DistributedType` values that `grpo-run launch` starts, and their kind."""
KNOWN: Final = (
    *LAUNCHABLE,
    "MULTI_NPU",
    "MULTI_MLU",
    "MULTI_SDAA",
    "MULTI_MUSA",
    "MULTI_XPU",
    "MULTI_HPU",
    "MULTI_NEURON",
    "XLA",
    "MEGATRON_LM",
)
"""All types that accelerate 1.15 knows, to tell unsupported ones from misspelt ones."""
LARGEST_FILE_BYTES: Final = 1 << 20
NUM_PROCESSES_UNSET: Final = -1
"""accelerate's default if the file leaves `num_processes` to the command line."""

Section = dict[str, Any]


class AccelerateFile(BaseModel):
    """The keys that grpo-run reads itself; accelerate reads all keys from the file again."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    compute_environment: StrictStr = "LOCAL_MACHINE"
    distributed_type: StrictStr
    num_processes: StrictInt = NUM_PROCESSES_UNSET
    num_machines: StrictInt = Field(default=1, ge=1)
    use_cpu: StrictBool = False
    mixed_precision: StrictStr | None = None
    gpu_ids: StrictStr | None = None
    deepspeed_config: Section | None = None
    fsdp_config: Section | None = None
    fp8_config: Section | None = None
    dynamo_config: Section | None = None
    parallelism_config: Section | None = None
    megatron_lm_config: Section | None = None
    mpirun_config: Section | None = None

    @property
    def kind(self) -> str:
        """`ddp`, `fsdp`, `deepspeed` or `no`."""
        return LAUNCHABLE[self.distributed_type]


def nearest(name: str, names: tuple[str, ...] | list[str]) -> str:
    """Return `"; did you mean X?"` if one of the names is close, otherwise ""."""
    near = difflib.get_close_matches(name.upper(), [known.upper() for known in names], n=1, cutoff=0.6)
    return f"; did you mean {next(known for known in names if known.upper() == near[0])}?" if near else ""


def read(path: Path) -> AccelerateFile:
    """Read and check the file.

    Args:
        path: a YAML file, or JSON if its name ends in `.json`, as for accelerate.

    Raises:
        ConfigError: the file is missing, unreadable, too large or malformed (with the line), a value has the
            wrong type, or grpo-run does not launch the `distributed_type`.
    """
    content = _parse(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: an accelerate configuration must be a mapping of keys to values")
    _check_bare_words(path, content)
    if "distributed_type" not in content:
        raise ConfigError(f"{path}: no distributed_type; write one of {', '.join(LAUNCHABLE)}")
    try:
        file = AccelerateFile.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        hint = ", write it in quotes" if first["type"] == "string_type" else ""
        raise ConfigError(f"{path}: {key}: {first['msg']}, got {first['input']!r}{hint}") from None
    _check_types(path, file)
    return file


def _parse(path: Path) -> object:
    try:
        with path.open("rb") as stream:
            data = stream.read(LARGEST_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such accelerate configuration file (from {Path.cwd()})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the accelerate configuration: {error.strerror}") from None
    if len(data) > LARGEST_FILE_BYTES:
        raise ConfigError(f"{path}: larger than {LARGEST_FILE_BYTES} bytes, not an accelerate configuration")
    try:
        text = data.decode()
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: malformed JSON: {error.msg}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise ConfigError(f"{path}:{line}: malformed YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: malformed YAML: {str(error).splitlines()[0]}") from None


def _check_bare_words(path: Path, content: Section) -> None:
    """Refuse a bare `no`, which YAML 1.1 reads as false: accelerate would fail with an unrelated error."""
    for key, written in (("distributed_type", "'NO'"), ("mixed_precision", "'no'")):
        if content.get(key) is False:
            raise ConfigError(
                f"{path}: {key}: YAML reads a bare no as false; write {written}, with the quotes"
            )


def _check_types(path: Path, file: AccelerateFile) -> None:
    if file.compute_environment != "LOCAL_MACHINE":
        raise ConfigError(
            f"{path}: compute_environment {file.compute_environment} is not started by grpo-run launch;"
            " it starts LOCAL_MACHINE"
        )
    name = file.distributed_type
    if name not in LAUNCHABLE:
        why = (
            f"is not started by grpo-run launch; it starts {', '.join(LAUNCHABLE)}"
            if name in KNOWN
            else f"is unknown to accelerate{nearest(name, KNOWN)}"
        )
        raise ConfigError(f"{path}: distributed_type {name} {why}")
    if file.num_processes < 1 and file.num_processes != NUM_PROCESSES_UNSET:
        raise ConfigError(f"{path}: num_processes {file.num_processes}: write 1 or more")
    if file.num_processes > 0 and file.num_processes % file.num_machines and file.kind != "no":
        raise ConfigError(
            f"{path}: num_processes {file.num_processes} is the number on all machines and cannot be"
            f" divided evenly by num_machines {file.num_machines}"
        )
