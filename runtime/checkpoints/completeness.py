"""Check whether a checkpoint without a manifest has every file that an exact resume requires.

Transformers resumes silently without an optimizer, a scheduler or random states; this module requires them.
Called when a run resumes from a checkpoint that it did not write, and by `grpo-run checkpoints`. Does not
read tensors and does not compare digests; see `_file_checks.py` for what is checked in each file.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from grpo_run.runtime.checkpoints._file_checks import (
    DamagedFileError,
    check_distributed_folder,
    check_torch_file,
    read_json_object,
    read_safetensors_header,
    read_shard_names,
)
from grpo_run.runtime.checkpoints.compatibility import SavedTensor

TRAINER_STATE = "trainer_state.json"
WEIGHT_STEMS = ("model", "adapter_model")
_WEIGHT_FILES = ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "adapter_model.bin")
_WEIGHT_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_RANK_STATE = re.compile(r"rng_state_([0-9]+)\.pth")
_DEEPSPEED_TAG = re.compile(r"global_step[0-9]+")


def find_problems(
    path: Path, world_size: int | None = None, layout: str | None = None, *, verify_checksums: bool = False
) -> list[str]:
    """Return one phrase per missing or damaged file of a checkpoint; an empty list if it is complete.

    Args:
        path: a directory as transformers writes it.
        world_size: number of ranks whose state is required; None to infer it from the files. A checkpoint of
            another number of ranks is also complete, if that number can be determined.
        layout: how the state is distributed over ranks (`ddp`, `deepspeed-zero2`, `fsdp2`); None to infer it.
        verify_checksums: read torch's files and compare their checksums.
    """
    try:
        names = set(os.listdir(path))
    except OSError as error:
        return [f"{path} cannot be read: {error.strerror}"]
    check = _CompletenessCheck(path, names, verify_checksums)
    check.run(world_size, layout)
    return check.problems


def count_ranks(path: Path) -> int | None:
    """Return how many ranks wrote a checkpoint, from its random state files, or None if unknown."""
    try:
        names = os.listdir(path)
    except OSError:
        return None
    ranks = _numbered_ranks(names)
    if ranks:
        return max(ranks) + 1
    return 1 if "rng_state.pth" in names else None


def saved_tensors(path: Path) -> dict[str, SavedTensor]:
    """Return the tensors of a checkpoint's weights, from safetensors headers; empty if there are none.

    Unreadable headers are skipped: the result only explains a difference in model shape.
    """
    found: dict[str, SavedTensor] = {}
    for stem in WEIGHT_STEMS:
        files = [path / f"{stem}.safetensors"]
        with contextlib.suppress(OSError, DamagedFileError):  # not sharded
            files += [path / name for name in read_shard_names(path / f"{stem}.safetensors.index.json")]
        for file in files:
            with contextlib.suppress(OSError, DamagedFileError):
                found |= read_safetensors_header(file)
    return found


class _CompletenessCheck:
    """One check of one directory; collects `problems`."""

    def __init__(self, path: Path, names: Collection[str], verify_checksums: bool) -> None:
        self.problems: list[str] = []
        self._path = path
        self._names = names
        self._verify_checksums = verify_checksums

    def run(self, world_size: int | None, layout: str | None) -> None:
        """Check every file that the layout requires."""
        kind = (layout or _infer_layout(self._names)).partition("-")[0]
        self._check(TRAINER_STATE, read_json_object)
        if "config.json" in self._names:
            self._check("config.json", read_json_object)
        if kind == "deepspeed":
            self._check_deepspeed(world_size, layout)
            if _has_weights(self._names):  # DeepSpeed does not load them, but the user may
                self._check_weights()
        elif kind.startswith("fsdp"):
            self._check_fsdp()
        else:
            self._check_weights()
            self._check_torch("optimizer.pt")
        if kind != "deepspeed" or "scheduler.pt" in self._names:
            self._check_torch("scheduler.pt")
        for name in ("scaler.pt", "training_args.bin"):
            if name in self._names:
                self._check_torch(name)
        for name in _required_random_states(self._names, world_size):
            self._check_torch(name)

    def _check(self, name: str, check: Callable[[Path], Any]) -> None:
        try:
            check(self._path / name)
        except DamagedFileError as error:
            self.problems.append(f"{name} {error}")
        except FileNotFoundError:
            self.problems.append(f"{name} is missing")
        except OSError as error:
            self.problems.append(f"{name} {error.strerror}")

    def _check_torch(self, name: str) -> None:
        self._check(name, lambda path: check_torch_file(path, self._verify_checksums))

    def _check_weight_file(self, name: str) -> None:
        if name.endswith(".safetensors"):
            self._check(name, read_safetensors_header)
        else:
            self._check_torch(name)

    def _check_weights(self) -> None:
        """Check weights in one file, in shards, or of adapters, at the top or in one folder per adapter."""
        folders = [""] if _has_weights(self._names) else []
        for name in sorted(self._names):
            if (self._path / name).is_dir() and any(
                (self._path / name / f"adapter_model.{suffix}").exists() for suffix in ("safetensors", "bin")
            ):
                folders.append(f"{name}/")
        if not folders:
            self.problems.append("model.safetensors is missing")
        for folder in folders:
            names = self._names if not folder else os.listdir(self._path / folder)
            for name in sorted(names):
                if name.endswith(".index.json") and name.startswith(("model.", "pytorch_model.")):
                    self._check_shards(folder, name)
                elif name in _WEIGHT_FILES:
                    self._check_weight_file(folder + name)

    def _check_shards(self, folder: str, index: str) -> None:
        self._check(folder + index, read_shard_names)
        try:
            shards = read_shard_names(self._path / folder / index)
        except (OSError, DamagedFileError):
            return  # reported for the index
        for shard in shards:
            self._check_weight_file(folder + shard)

    def _check_fsdp(self) -> None:
        """Check Accelerate's two formats: one file, or a folder in torch's distributed checkpoint format."""
        for stem, single in (
            ("pytorch_model_fsdp", "pytorch_model_fsdp.bin"),
            ("optimizer", "optimizer.bin"),
        ):
            folders = [name for name in sorted(self._names) if re.fullmatch(rf"{stem}_[0-9]+", name)]
            for folder in folders:
                self._check(folder, check_distributed_folder)
            if not folders:
                self._check_torch(single)

    def _check_deepspeed(self, world_size: int | None, layout: str | None) -> None:
        """Check the folder that `latest` names: model states, and one optimizer file per rank."""
        try:
            tag = (self._path / "latest").read_text(errors="replace").strip()
        except OSError:
            self.problems.append("latest is missing")
            return
        try:
            names = set(os.listdir(self._path / tag)) if _DEEPSPEED_TAG.fullmatch(tag) else set()
        except OSError:
            names = set()
        if not names:
            self.problems.append(f"{tag[:40]}/, which latest names, is missing")
            return
        written_by = count_ranks(self._path)
        ranks = max(world_size or written_by or 1, written_by or 1)
        if "mp_rank_00_model_states.pt" in names:
            self._check_torch(f"{tag}/mp_rank_00_model_states.pt")
        else:
            for rank in range(ranks):
                self._check_torch(f"{tag}/zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        optimizers = [name for name in names if name.endswith("_optim_states.pt")]
        if optimizers or "zero" in (layout or ""):
            prefix = "bf16_" if any(name.startswith("bf16_") for name in optimizers) else ""
            for rank in range(ranks):
                self._check_torch(f"{tag}/{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def _infer_layout(names: Iterable[str]) -> str:
    if any(_DEEPSPEED_TAG.fullmatch(name) for name in names):
        return "deepspeed"
    if any(name.startswith("pytorch_model_fsdp") for name in names):
        return "fsdp"
    return "ddp"


def _has_weights(names: Iterable[str]) -> bool:
    return any(name in _WEIGHT_FILES or name in _WEIGHT_INDEXES for name in names)


def _numbered_ranks(names: Iterable[str]) -> list[int]:
    return [int(match[1]) for name in names if (match := _RANK_STATE.fullmatch(name))]


def _required_random_states(names: Collection[str], world_size: int | None) -> list[str]:
    """Return the required file names: `rng_state.pth` of one rank, or numbered files of two or more ranks."""
    ranks = _numbered_ranks(names)
    if not ranks:
        single = world_size in (None, 1) or "rng_state.pth" in names
        return ["rng_state.pth"] if single else [f"rng_state_{rank}.pth" for rank in range(world_size or 0)]
    # with fewer files than ranks, either fewer ranks wrote it or some did not finish: assume the latter
    count = max(max(ranks) + 1, 2, world_size or 0)
    return [f"rng_state_{rank}.pth" for rank in range(count)]
