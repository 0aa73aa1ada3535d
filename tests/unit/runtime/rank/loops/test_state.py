"""What a loop's state is made of, who writes it, and that it is restored in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_run.runtime.errors import CheckpointError, ConfigError
from grpo_run.runtime.rank.loops._rank_state import LoadedRankState, check_values, save, set_random_state
from grpo_run.runtime.rank.loops._state import LoopState


def entries(seed: int) -> dict[str, Any]:
    """A state of every kind."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    for _ in range(seed):
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
    return {
        "model": model, "optimizer": optimizer, "scheduler": scheduler,
        "generator": torch.Generator().manual_seed(seed), "numbers": np.random.default_rng(seed),
        "best": float(seed), "history": [seed], "mean": torch.full((2,), float(seed)), "seen": {seed},
        "table": {"a": seed},
    }  # fmt: skip


def written(tmp_path: Path, state: LoopState) -> Path:
    """Write one rank's part of a checkpoint."""
    folder = tmp_path / "checkpoint-4"
    folder.mkdir(exist_ok=True)
    state.write(folder)
    save(folder, state, step=4, data=None, gradient_orders={}, features=None)
    return folder


def test_everything_is_restored_in_place(tmp_path: Path) -> None:
    """Other objects of the script refer to it. `load_state_dict` reads the versions of modules."""
    folder = written(tmp_path, LoopState(entries(3), rank=0, world_size=1))
    expected, present = entries(3), entries(1)
    metadata = expected["model"].state_dict()._metadata
    assert torch.load(folder / "model.pt", weights_only=True)._metadata == metadata
    kept = dict(present)
    state = LoopState(present, rank=0, world_size=1)
    state.load(folder)
    loaded = LoadedRankState(folder, 0, torch.device("cpu"))
    loaded.restore(state)
    set_random_state(state.generators, loaded.randomness)
    assert [key for key in kept if present[key] is not kept[key]] == ["best"]
    for key in ("best", "history", "seen", "table"):
        assert present[key] == expected[key]
    assert torch.equal(present["mean"], expected["mean"])
    for key in ("model", "optimizer", "scheduler"):
        assert repr(present[key].state_dict()) == repr(expected[key].state_dict())
    assert torch.equal(
        torch.rand(3, generator=present["generator"]), torch.rand(3, generator=expected["generator"])
    )
    assert present["numbers"].random() == expected["numbers"].random()


def test_ranks_that_may_differ_write_their_own_files(tmp_path: Path) -> None:
    """Without DistributedDataParallel nothing shows that they are equal."""
    for rank in range(2):
        state = LoopState(entries(rank + 1), rank=rank, world_size=2)
        assert state.layout == "per-rank"
        folder = written(tmp_path, state)
    assert sorted(path.name for path in folder.glob("*.pt")) == [
        "model.rank0.pt", "model.rank1.pt", "optimizer.rank0.pt", "optimizer.rank1.pt",
    ]  # fmt: skip
    present = entries(5)
    LoopState(present, rank=1, world_size=2).load(folder)
    assert repr(present["model"].state_dict()) == repr(entries(2)["model"].state_dict())


@pytest.mark.parametrize("key", ["a/b", "..", "ü", "a b", "%"])
def test_any_key_is_a_file_in_the_checkpoint(tmp_path: Path, key: str) -> None:
    """Keys are the user's."""
    model = torch.nn.Linear(2, 2)
    folder = written(tmp_path, LoopState({key: model}, rank=0, world_size=1))
    (file,) = folder.glob("*.pt")
    assert file.parent == folder
    other = torch.nn.Linear(2, 2)
    LoopState({key: other}, rank=0, world_size=1).load(folder)
    assert torch.equal(other.weight, model.weight)


class DeepSpeedEngine(torch.nn.Module):
    """A class with this name."""


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """A class with this name."""


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (DeepSpeedEngine(), "DeepSpeed"),
        (ZeroRedundancyOptimizer([torch.nn.Parameter(torch.ones(1))], lr=0.1), "ZeroRedundancyOptimizer"),
    ],
)
def test_what_ranks_cannot_save_for_themselves_is_refused(value: Any, reason: str) -> None:
    """The message names the entry, the reason and what to use."""
    with pytest.raises(ConfigError, match=reason) as raised:
        LoopState({"it": value}, rank=0, world_size=1)
    assert "state['it']" in str(raised.value)
    assert "FSDP2" in str(raised.value)


def test_a_value_that_cannot_be_saved_is_refused_at_the_start() -> None:
    """The message names the entry and its type."""
    with pytest.raises(ConfigError, match=r"state\['it'\] is a object"):
        check_values(LoopState({"it": object()}, rank=0, world_size=1))
    with pytest.raises(ConfigError, match="not a name"):
        LoopState({1: 2}, rank=0, world_size=1)  # type: ignore[dict-item]


def test_a_state_that_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    """An object in an optimizer's groups would be refused by `torch.load`."""
    state = entries(1)
    state["optimizer"].param_groups[0]["schedule"] = lambda step: step
    with pytest.raises(ConfigError, match=r"state of 'optimizer'\['param_groups'\]\[0\]\['schedule'\]"):
        written(tmp_path, LoopState(state, rank=0, world_size=1))


def test_an_entry_that_the_checkpoint_lacks_or_that_does_not_fit_is_named(tmp_path: Path) -> None:
    """The script has changed. The message names the entry and the checkpoint."""
    folder = written(tmp_path, LoopState({"best": 1.0}, rank=0, world_size=1))
    with pytest.raises(CheckpointError, match=r"state\['model'\]"):
        LoopState({"model": torch.nn.Linear(1, 1)}, rank=0, world_size=1).load(folder)
    loaded = LoadedRankState(folder, 0, torch.device("cpu"))
    with pytest.raises(CheckpointError, match=r"state\['other'\]"):
        loaded.restore(LoopState({"best": 1.0, "other": 2}, rank=0, world_size=1))
    folder = written(tmp_path, LoopState({"model": torch.nn.Linear(2, 2)}, rank=0, world_size=1))
    with pytest.raises(CheckpointError, match=r"does not fit state\['model'\]"):
        LoopState({"model": torch.nn.Linear(3, 3)}, rank=0, world_size=1).load(folder)


def test_fsdp1_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also inside a module of the script's own."""
    from torch.distributed import fsdp

    class Flattened(torch.nn.Module):
        """Stands for a module whose parameters are flattened; a real one needs an accelerator."""

    monkeypatch.setattr(fsdp, "FullyShardedDataParallel", Flattened)
    with pytest.raises(ConfigError, match="FSDP1"):
        LoopState({"model": torch.nn.Sequential(Flattened())}, rank=0, world_size=1)
