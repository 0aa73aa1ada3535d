"""Contract with TRL's AsyncGRPO: the names that are used exist, and are looked up when they are needed."""

from __future__ import annotations

import contextlib
import inspect
import logging
import queue
from collections import defaultdict
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
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


def test_prompts_are_drawn_in_their_order_and_counted_where_the_ledger_looks(
    sources: tuple[str, str, str],
) -> None:
    """From the data set and the position that the worker was given, when it is started."""
    trainer, worker, _ = sources
    module = pytest.importorskip("trl.experimental.async_grpo.async_rollout_worker", reason="TRL without it")
    loop = inspect.getsource(module._AsyncRolloutLoop)
    assert f"self.{names.LOOP} = loop_kwargs" in worker
    assert getattr(module.AsyncRolloutWorker, names.LOOP_CLASS) is module._AsyncRolloutLoop
    assert f"def {names.REPEAT}(self)" in loop
    assert f"self.{names.LOOP}," in worker[worker.index(f"def {names.START}(") :]
    assert f'loop_kwargs.setdefault("{names.FIRST}", 0)' in worker
    assert f"start = {names.FIRST} % len({names.DATASET})" in loop
    assert f"iter({names.DATASET}.select(range(start, len({names.DATASET}))))" in loop
    assert "for _ in range(self.num_generations):\n                yield group_id, row" in loop
    assert f'self.{names.WORKER}.{names.LOOP}["{names.FIRST}"] = 0' in trainer
    assert f"self.{names.BEFORE} = 0" in trainer
    assert f"groups_trained=self.{names.COLLATED}" in trainer


def test_each_micro_batch_tells_its_rows(sources: tuple[str, str, str]) -> None:
    """Once, and a trainer has them in the order in which it has taken them from the queue."""
    module = pytest.importorskip("trl.experimental.async_grpo.async_grpo_trainer", reason="TRL without it")
    collator = inspect.getsource(module.DataCollatorForRollout)
    assert collator.count("self.groups_trained.update(") == 1
    assert 'update(example["group_id"] for example in all_examples)' in collator
    assert "if n > self.token_budget:" in inspect.getsource(module.TokenBudgetBatcher)
    stop = inspect.getsource(module._EpochStopCallback)
    assert f"self._trainer.{names.BEFORE} + len(self._trainer.{names.COLLATED})" in stop


def test_the_process_tells_how_many_requests_have_failed(sources: tuple[str, str, str]) -> None:
    """And how many were answered."""
    trainer, worker, _ = sources
    module = pytest.importorskip("trl.experimental.async_grpo.async_rollout_worker", reason="TRL without it")
    loop = inspect.getsource(module._AsyncRolloutLoop)
    assert f"self.{names.MEASURED} = ctx.Queue(maxsize={names.MOST_MEASURED})" in worker
    assert f"self.{names.WORKER}.{names.MEASURED}.get_nowait().items()" in trainer
    assert f'self._counters["{names.FAILED_REQUESTS}"] += 1' in loop
    assert f'self._rates["{names.TURNS}"][0] += turns' in loop


def test_the_process_calls_tools_and_environments_where_they_are_bounded(
    sources: tuple[str, str, str],
) -> None:
    """Through one executor, after `reset` of the same environment, and with its class from the worker."""
    _, worker, _ = sources
    module = pytest.importorskip("trl.experimental.async_grpo.async_rollout_worker", reason="TRL without it")
    loop, group = inspect.getsource(module._AsyncRolloutLoop), inspect.getsource(module.RolloutGroup)
    assert f"self.{names.LOOP_CLASS}," in worker[worker.index(f"def {names.START}(") :]
    for argument in (names.TOOLS, names.ENVIRONMENT_FACTORY, names.POLICY):
        assert f"        {argument}: " in loop
    executor = f"self.{names.TOOL_THREADS}"
    executor, flat = f"run_in_executor(self.{names.TOOL_THREADS}, ", "".join(loop.split())
    bounded = ("functools.partial(tool,", "functools.partial(environment.reset,", "get_reward)")
    assert all("".join(f"{executor}{one}".split()) in flat for one in bounded)
    assert flat.count("run_in_executor(") == len(bounded)
    reset = loop.index("environment.reset, **reset_kwargs")
    assert reset < loop.index(f"self.{names.CONVERSE}(prompt, tool_dict=tool_dict")
    assert f"samples = await self.{names.SCORE}(group)" in loop
    assert f"self.{names.EVENT_LOOP} = asyncio.new_event_loop()" in loop
    assert f"self.{names.ENVIRONMENT_POOL}[name].append(environment)" in loop
    assert all(f"    {name}: list[" in group for name in names.GROUP_REWARDS)


def test_a_set_that_is_watched_is_a_set() -> None:
    """And the trainer has its own again afterwards, with what was added."""
    told: list[int] = []
    trainer = SimpleNamespace(**{names.COLLATED: {1}})
    with ExitStack() as hooks:
        names.tell_collated(trainer, hooks, told.append)
        getattr(trainer, names.COLLATED).update(number for number in (1, 1, 2))
    assert told == [3]
    assert getattr(trainer, names.COLLATED) == {1, 2}
    assert type(getattr(trainer, names.COLLATED)) is set


@pytest.mark.parametrize("missing", [names.LOOP, names.LOOP_CLASS, names.COLLATED, names.BEFORE])
def test_an_order_that_is_not_known_is_left_alone(missing: str) -> None:
    """Of another release of TRL, or another worker."""
    draws = SimpleNamespace(_repeat_iterator=SimpleNamespace(__module__="trl.here"))
    worker = {names.LOOP: {names.DATASET: [], names.FIRST: 0}, names.LOOP_CLASS: draws}
    trainer = {names.COLLATED: set[int](), names.BEFORE: 0}
    assert names.knows_order(SimpleNamespace(rollout_worker=SimpleNamespace(**worker), **trainer))
    worker.pop(missing, None)
    trainer.pop(missing, None)
    assert not names.knows_order(SimpleNamespace(rollout_worker=SimpleNamespace(**worker), **trainer))


@pytest.mark.parametrize("token_budget", [0, 12])
def test_micro_batches_have_the_rows_in_the_order_of_the_queue(
    token_budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a trainer drops is told before: by TRL's own queue, batchers and collator."""
    module = pytest.importorskip("trl.experimental.async_grpo.async_grpo_trainer", reason="TRL without it")
    monkeypatch.setattr(module, "logger", logging.getLogger("trl"))  # accelerate's needs a rank
    arguments = SimpleNamespace(max_staleness=1, token_budget=token_budget)
    trainer = SimpleNamespace(args=arguments, model_version=3)
    waiting: queue.Queue[Any] = queue.Queue()
    expected = []
    for number in range(40):
        tokens = 3 + number * 7 % 11
        row = module.RolloutSample(
            prompt=[], completion=[], input_ids=np.arange(tokens), group_id=number // 3,
            completion_mask=np.ones(tokens, dtype=int), old_log_probs=np.zeros(tokens, dtype=np.float32),
            advantage=float(number), metrics={"reward": 0.0}, model_version=1 if number % 9 == 4 else 3,
        )  # fmt: skip
        waiting.put(row)
        expected += [number] * (not names.dropped(trainer, row))

    def empty(_: float) -> None:
        raise EOFError

    sink: Any = defaultdict(list)
    data = module.RolloutQueueDataset(
        waiting, lambda: 3, empty, 1.0, sink, max_staleness=1, poll_interval_s=0.01
    )
    batches = module.FixedCountBatcher(data, 2, 4)
    if token_budget:
        batches = module.TokenBudgetBatcher(data, 2, token_budget, sink)
    told: list[int] = []
    collator = module.DataCollatorForRollout(0, 2, groups_trained=names._Collated(set(), told.append))
    found: list[int] = []
    with contextlib.suppress(EOFError):
        for rows in batches:
            found += sorted(int(one["advantage"]) for row in rows for one in row.samples)
            collator.torch_call([rows])
            assert sum(told) == len(found)
    assert len(told) > 3
    assert found == expected[: len(found)]
    assert len(expected) - len(found) < 8  # they fill no micro-batch
