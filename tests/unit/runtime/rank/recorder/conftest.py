"""A recorder on a real Gloo group of one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.runtime.rank.collective_recorder import Recorder
from grpo_run.runtime.upstream import torch_names


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """The default process group: Gloo, with this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def warnings() -> list[str]:
    """The warnings of the recorder."""
    return []


@pytest.fixture
def recorder(slot: SlotWriter, warnings: list[str]) -> Recorder:
    """A recorder that writes to the slot."""
    return Recorder(slot, warnings.append)


@pytest.fixture
def installed(recorder: Recorder, group: None, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """The recorder, installed in torch's classes, whose methods are restored."""
    for name in torch_names.COLLECTIVE_METHODS:
        monkeypatch.setattr(c10d.ProcessGroup, name, getattr(c10d.ProcessGroup, name))
    monkeypatch.setattr(c10d.Work, "wait", c10d.Work.wait)
    recorder.install(c10d)
    return recorder
