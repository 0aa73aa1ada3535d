"""Names of TRL's AsyncGRPO, which trains beside a process that makes its rollouts.

Used by the features of the rollout server and of the ledger in a rank. `rollout_worker` and what
`RolloutWorkerProtocol` lists are public, the others are not; a contract test says what a release has changed.
Contains names, and what follows from them.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from grpo_run.runtime.upstream.patches import override_attributes

WORKER = "rollout_worker"
"""Trainer attribute, on rank 0: what makes the rollouts, with the attribute `BUFFER`, a queue, and the
methods `HEALTH` (seconds), which raises, and `STOP`."""
BUFFER = "rollout_buffer"
HEALTH, STOP = "check_health", "stop"
PROCESS = "_process"
"""Attribute of TRL's own worker: the `multiprocessing.Process` that it has spawned, None before and after."""
ADAPTER_FOLDER = "_lora_dir"
"""Trainer attribute: the folder of the adapters that it sends to the server, by their path."""
SENDS_ADAPTERS = "_lora_sync"
"""Trainer attribute: whether weights are sent as an adapter. Only AsyncGRPO has it."""
CLIENT = "vllm_client"
"""Trainer attribute, on rank 0: the client, whose `server_url` is the server's address."""

ADAPTER = "_lora_name"
"""Trainer attribute: how the names of its adapters begin."""
VERSION = "model_version"
"""Attribute of trainer and sample: the number of a policy."""
STALENESS = "max_staleness"
"""Field of the configuration: by how many policies a sample may be older than the trainer."""


def rollout_process(worker: Any) -> Any | None:
    """Return the process that makes the rollouts; None if there is none now, or the worker is another."""
    return getattr(worker, PROCESS, None)


def forget_process(worker: Any) -> None:
    """Let a worker stop without a word to its process, which has ended."""
    setattr(worker, PROCESS, None)


def adapter_folder(trainer: Any) -> tuple[str, str] | None:
    """Return the server's address and the folder of the adapters; None where the trainer sends none."""
    client = getattr(trainer, CLIENT, None)
    if client is None or not sends_adapters(trainer):
        return None
    return str(client.server_url), str(getattr(trainer, ADAPTER_FOLDER))


def sends_adapters(trainer: Any) -> bool:
    """Whether it sends its weights as an adapter; equal on all ranks."""
    return bool(getattr(trainer, SENDS_ADAPTERS, False))


def policy(trainer: Any) -> str:
    """Return the name under which the trainer has sent its weights last."""
    return f"{getattr(trainer, ADAPTER, '')}-v{getattr(trainer, VERSION)}"


def staleness(trainer: Any) -> int:
    """Return by how many policies a sample may be older than the trainer."""
    return int(getattr(trainer.args, STALENESS))


def is_too_old(trainer: Any, sample: Any) -> bool:
    """Whether the trainer drops a sample."""
    return int(getattr(trainer, VERSION)) - int(getattr(sample, VERSION)) > staleness(trainer)


COLLATED = "_trained_groups"
"""Trainer attribute: the numbers of the groups of which the collator has had a row. It calls `update` with
those of the rows of each micro-batch."""
BEFORE = "_groups_before_resume"
"""Trainer attribute: how many prompts were trained before the call went on, for the end of the last epoch."""
START = "start"
LOOP = "_loop_kwargs"
"""Attribute of TRL's own worker: what its process is started with, among it `DATASET`, and `FIRST`: the
position in it of the first prompt that is drawn."""
DATASET, FIRST = "dataset", "dataset_start_index"
LOOP_CLASS, REPEAT = "_loop_cls", "_repeat_iterator"
"""Attribute of that worker: what runs in its process, and its method that draws prompts."""
UNKNOWN_ORDER = (
    "how the rollout worker of this trainer, or of this release of TRL, draws prompts is not known: there is"
    " no ledger, and after a resume they go on as TRL decides"
)


TOOLS, ENVIRONMENT_FACTORY, POLICY = "tools", "environment_factory", "model_version_value"
"""Arguments of that class: what is called in its process, and the shared number of the policy."""
CONVERSE, SCORE = "_generate_one", "_score_group"
"""Its asynchronous methods: make a conversation (prompt, tool_dict=...), right after `reset` of its
environment, and return a tuple whose first element is the completion; and score a group of them, in which a
reward of None is none."""
GROUP_REWARDS = ("env_rewards", "rollout_rewards")
"""Attributes of a group: lists of rewards of its conversations, where None is none."""
TOOL_THREADS, ENVIRONMENT_POOL, EVENT_LOOP = "_tool_pool", "_environment_pool", "_loop"
"""Its attributes: the executor of blocking tools, resets and rewards of environments; idle environments by
name, missing without any; and the event loop."""


def agents_known(trainer: Any) -> bool | None:
    """Whether it is known how the worker's process calls tools and environments; None without any, and on
    other ranks than 0.
    """
    worker = getattr(trainer, WORKER, None)
    arguments = getattr(worker, LOOP, None) or {}
    if not (arguments.get(TOOLS) or arguments.get(ENVIRONMENT_FACTORY)):
        return None
    kind = getattr(worker, LOOP_CLASS, None)
    return hasattr(kind, CONVERSE) and hasattr(kind, SCORE)


class _Collated(set[int]):
    def __init__(self, groups: set[int], told: Callable[[int], None]) -> None:
        super().__init__(groups)
        self._told = told

    def update(self, *groups: Iterable[int]) -> None:
        numbers = [number for one in groups for number in one]
        self._told(len(numbers))
        super().update(numbers)


def tell_collated(trainer: Any, hooks: ExitStack, told: Callable[[int], None]) -> None:
    """Tell of each micro-batch how many rows it has, until `hooks` are closed."""
    groups = _Collated(getattr(trainer, COLLATED), told)
    setattr(trainer, COLLATED, groups)
    hooks.callback(lambda: setattr(trainer, COLLATED, set(groups)))


def knows_order(trainer: Any) -> bool | None:
    """Whether the order in which the worker draws prompts is known: it is TRL's own; None without a worker,
    as on other ranks than 0.
    """
    worker = getattr(trainer, WORKER, None)
    if worker is None:
        return None
    order = getattr(getattr(worker, LOOP_CLASS, None), REPEAT, None)
    named = {DATASET, FIRST} <= dict(getattr(worker, LOOP, {})).keys()
    known = str(getattr(order, "__module__", "")).startswith("trl.")
    return named and known and hasattr(trainer, COLLATED) and hasattr(trainer, BEFORE)


def draws(worker: Any) -> tuple[Any, int]:
    """Return the data set from which TRL's own worker draws, and the position of its first prompt."""
    arguments = getattr(worker, LOOP)
    return arguments[DATASET], int(arguments[FIRST])


def draw_from(trainer: Any, dataset: Any, first: int, trained: int) -> None:
    """Let TRL's own worker draw from a data set when it starts, after so many prompts were trained."""
    getattr(getattr(trainer, WORKER), LOOP).update({DATASET: dataset, FIRST: first})
    setattr(trainer, BEFORE, trained)


def group_and_tokens(sample: Any) -> tuple[int, int]:
    """Return the number of a sample's group, and how many of its tokens are in the loss."""
    return int(sample.group_id), int(sample.completion_mask.sum())


STALE, TOO_LONG = "stale", "longer than token_budget"


def dropped(trainer: Any, sample: Any) -> str:
    """Return why the trainer drops a sample, "" if it does not."""
    if is_too_old(trainer, sample):
        return STALE
    return TOO_LONG if 0 < (trainer.args.token_budget or 0) < len(sample.input_ids) else ""


MEASURED = "metrics_queue"
"""Attribute of the worker: the queue of what its process has measured since it sent the last, by name. The
trainer takes it when it logs."""
FAILED_REQUESTS = "rollout/vllm_retry_total"
"""Requests that have failed and were made again."""
TURNS = "rollout/turns_mean"
"""A pair of sums: the requests that were answered, and the rollouts that they were for."""
MOST_MEASURED = 4096
"""That wait for the trainer's next log line; as many as TRL keeps."""


class Requests:
    """Which of the requests of a trainer's worker have failed, on rank 0; elsewhere nothing is known."""

    def __init__(self, trainer: Any) -> None:
        self._queue = getattr(getattr(trainer, WORKER, None), MEASURED, None)
        self._take: Callable[[], Any] | None = getattr(self._queue, "get_nowait", None)
        self._waiting: deque[Any] = deque(maxlen=MOST_MEASURED)

    @contextmanager
    def read(self) -> Iterator[None]:
        """Let the trainer get for the length of the block what was taken before it asks."""
        if self._take is None:
            yield
            return
        take = self._take

        def get_nowait() -> Any:
            return self._waiting.popleft() if self._waiting else take()

        with override_attributes(self._queue, get_nowait=get_nowait):
            yield

    def aborted_share(self) -> float | None:
        """Return the share of the requests since the last call that have failed; None without any."""
        failed = answered = 0.0
        try:
            while self._take is not None:
                measured = self._take()
                self._waiting.append(measured)
                failed += measured.get(FAILED_REQUESTS, 0.0)
                answered += measured.get(TURNS, (0.0,))[0]
        except queue.Empty:
            pass
        return failed / (failed + answered) if failed + answered else None
