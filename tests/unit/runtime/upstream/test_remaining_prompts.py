"""What AsyncGRPO's process draws when a call goes on, by TRL's own code where it is installed."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import pytest
from datasets import Dataset

from grpo_run.runtime.upstream.remaining_prompts import RemainingPrompts

SIZE = 6
DATA = Dataset.from_dict({"prompt": list(range(SIZE))})
KINDS = {
    "data set": DATA,
    "stream": DATA.to_iterable_dataset(),
    "list": [{"prompt": at} for at in range(SIZE)],
}


def drawn(rest: RemainingPrompts, count: int) -> list[int]:
    """Return the first prompts, after a way by pickle."""
    return [row["prompt"] for row in itertools.islice(pickle.loads(pickle.dumps(rest)), count)]


@pytest.mark.parametrize("data", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("first", [0, 2, SIZE - 1, SIZE, 2 * SIZE + 3])
def test_what_is_not_done_comes_first_and_all_passes_after_it(data: Any, first: int) -> None:
    """Positions go on over the passes, also those that are done after the first one that is not."""
    done = {first + 1, first + 3, first + 8}
    rest = RemainingPrompts(data, first, done)
    expected = [at % SIZE for at in range(first, first + 40) if at not in done]
    assert drawn(rest, len(expected)) == expected


def test_data_without_rows_ends() -> None:
    """TRL then says so itself."""
    assert drawn(RemainingPrompts([], 0, ()), 3) == []


def test_trls_process_draws_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the remaining prompts once for each completion, under numbers that begin anew."""
    module = pytest.importorskip("trl.experimental.async_grpo.async_rollout_worker", reason="TRL without it")
    loop = object.__new__(module._AsyncRolloutLoop)
    rest = RemainingPrompts(DATA, 3, {4})
    loop.dataset, loop.num_generations = rest, 2
    # as in its constructor, which does more
    loop._dataset_iter = iter(rest.select(range(3 % len(rest), len(rest))))
    found = [(number, row["prompt"]) for number, row in itertools.islice(loop._repeat_iterator(), 8)]
    assert found == [(0, 3), (0, 3), (1, 5), (1, 5), (2, 0), (2, 0), (3, 1), (3, 1)]
