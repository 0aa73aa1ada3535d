"""Contract with TRL's AsyncGRPO: the names that are used exist, and are looked up when they are needed."""

from __future__ import annotations

import inspect

import pytest

from grpo_run.runtime.upstream import async_grpo_names as names


@pytest.fixture(scope="module")
def sources() -> tuple[str, str, str]:
    """Return the sources of trainer, worker and client."""
    module = pytest.importorskip("trl.experimental.async_grpo.async_grpo_trainer", reason="TRL without it")
    found = (module.AsyncGRPOTrainer, module.AsyncRolloutWorker, module.VLLMClient)
    return tuple(inspect.getsource(one) for one in found)  # type: ignore[return-value]


def test_the_trainer_has_what_is_read_of_it(sources: tuple[str, str, str]) -> None:
    """And asks its worker through the attribute, so that a wrapper of the instance is called."""
    trainer, worker, client = sources
    assert f"self.{names.WORKER} = AsyncRolloutWorker(" in trainer
    assert f"self.{names.WORKER}.{names.STOP}()" in trainer
    assert f"self.{names.WORKER}.{names.HEALTH}" in trainer
    assert f"self.{names.WORKER}.{names.BUFFER}" in trainer
    assert f"self.{names.SENDS_ADAPTERS} = lora_sync" in trainer
    assert f"self.{names.ADAPTER_FOLDER} = os.path.abspath(" in trainer
    assert f"self.{names.CLIENT} = (" in trainer
    assert f'self.{names.ADAPTER} = "' in trainer
    assert f'f"{{self.{names.ADAPTER}}}-v{{version}}"' in trainer
    assert f"self.{names.VERSION} = version" in trainer
    assert "self.server_url = " in client
    assert f"self.{names.PROCESS} = self._mp_ctx.Process(" in worker


def test_a_worker_without_a_process_stops_at_once(sources: tuple[str, str, str]) -> None:
    """So that it can be told to forget one that has ended."""
    _, worker, _ = sources
    stop = worker[worker.index(f"def {names.STOP}(") :]
    assert stop.index(f"if self.{names.PROCESS} is None:\n            return") < stop.index(".set()")


def test_samples_and_configuration_say_how_old_a_sample_may_be() -> None:
    """A trainer drops a sample that is older."""
    module = pytest.importorskip("trl.experimental.async_grpo.async_grpo_trainer", reason="TRL without it")
    source = inspect.getsource(module.RolloutQueueDataset)
    assert f"staleness = version - sample.{names.VERSION}" in source
    assert "if staleness > self.max_staleness:" in source
    assert names.STALENESS in module.AsyncGRPOConfig.__dataclass_fields__
