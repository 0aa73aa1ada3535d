"""What a callback asks of the trainer on one rank is done on all ranks, by the vote."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import DefaultFlowCallback, TrainerCallback, TrainerControl, TrainerState
from transformers.integrations import TensorBoardCallback

from grpo_run.runtime.rank.hooks._control import ControlVote, read_flags
from grpo_run.runtime.rank.vote import ControlRequests, decode_requests, encode_requests

STOP = ControlRequests(should_training_stop=True)
SAVE = ControlRequests(should_save=True)
NONE = ControlRequests()
ARGUMENTS: Any = SimpleNamespace(
    logging_first_step=False, logging_strategy="no", eval_strategy="no", save_strategy="no", eval_delay=0
)


class Rank:
    """One of two ranks, whose peer asks for `peer` in each exchange."""

    def __init__(self, *callbacks: Any, ends: tuple[int, int] = (0, 0)) -> None:
        self.control = TrainerControl()
        self.state = TrainerState(global_step=3, max_steps=10)
        self.peer = NONE
        self.exchanges = 0
        self.shown: list[str] = []
        self.noted: list[tuple[int, int]] = []
        self.loading = SimpleNamespace(in_dataloader=True, end_of_dataloader=False)
        self.flow = DefaultFlowCallback()
        board = SimpleNamespace(
            note_data_end=lambda rank, step: self.noted.append((rank, step)), data_ends=lambda: list(ends)
        )
        self.session: Any = SimpleNamespace(
            votes=SimpleNamespace(maximum=int, requests=self._exchange),
            board=board, rank=1, world_size=2, local_world_size=2, show_warning=self.shown.append,
        )  # fmt: skip
        self.trainer = SimpleNamespace(
            callback_handler=SimpleNamespace(callbacks=[self.flow, *callbacks]),
            control=self.control,
            state=self.state,
            accelerator=SimpleNamespace(gradient_state=self.loading),
        )
        self.vote = ControlVote(self.trainer, self.session, lambda: None)

    def _exchange(self, requests: ControlRequests) -> tuple[ControlRequests, ControlRequests]:
        self.exchanges += 1
        both = zip(encode_requests(requests), encode_requests(self.peer), strict=True)
        return decode_requests([max(pair) for pair in both])

    def ends_step(self, *asks: str, now: ControlRequests = NONE) -> ControlRequests:
        """End a step in which a callback sets flags, and return what the trainer is to do."""
        with self.vote.observed():
            self.flow.on_step_end(ARGUMENTS, self.state, self.control)
        self.vote.note("Asks.on_step_end", lambda: [setattr(self.control, name, True) for name in asks])
        asked = self.vote.asked(self.control)
        self.vote.answer(self.control, self.state.global_step, asked, now)
        return asked


def test_what_only_this_rank_asks_for_is_left_for_the_next_step_and_said() -> None:
    """The rank and the callback are named, once."""
    rank = Rank()
    assert rank.ends_step("should_training_stop") == STOP
    assert read_flags(rank.control) == NONE
    assert rank.ends_step("should_training_stop", now=STOP._replace(should_save=True)) == STOP
    assert read_flags(rank.control) == STOP._replace(should_save=True)
    assert rank.shown == [
        (
            "rank 1: Asks.on_step_end asked to stop after step 3, but not on every rank: all ranks do so"
            " after step 4"
        )
    ]


def test_what_all_ranks_ask_for_is_done_at_once() -> None:
    """As under torchrun, and without a word."""
    rank = Rank()
    rank.ends_step("should_save", now=SAVE)
    assert read_flags(rank.control) == SAVE
    assert rank.shown == []


def test_the_schedule_is_not_put_to_the_vote() -> None:
    """Also at the last step, if the script asks for a stop there."""
    rank = Rank()
    rank.state.global_step = 10
    rank.control.should_training_stop = True
    assert rank.ends_step("should_training_stop") == NONE
    assert rank.control.should_training_stop


@pytest.mark.parametrize("done", [SAVE, ControlRequests(should_evaluate=True)])
def test_a_stop_during_an_evaluation_or_a_save_stops_all_ranks_with_one_save(done: ControlRequests) -> None:
    """The trainer saves once more, unless it has just saved."""
    rank, calls = Rank(), []

    def log_evaluate_save() -> None:
        calls.append(read_flags(rank.control))
        rank.control.should_save = rank.control.should_evaluate = False
        if len(calls) == 1:
            rank.peer = STOP

    for name, is_set in done._asdict().items():
        setattr(rank.control, name, is_set)
    rank.vote.settle(log_evaluate_save)
    assert rank.control.should_training_stop
    assert calls == ([done] if done.should_save else [done, STOP._replace(should_save=True)])


def test_nothing_is_exchanged_after_a_step_in_which_nothing_was_due() -> None:
    """A log line counts only if a callback of the script listens to it."""

    class Listens(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None: ...

    silent, listening = Rank(TensorBoardCallback(SimpleNamespace())), Rank(Listens())
    for rank in (silent, listening):
        rank.vote.settle(lambda: None)
        rank.control.should_log = True
        rank.vote.settle(lambda: None)
    assert (silent.exchanges, listening.exchanges) == (0, 1)


def test_a_stop_at_the_end_of_an_epoch_on_another_rank_stops_this_one_with_a_save() -> None:
    """All ranks are at the end of the epoch."""
    rank = Rank()
    rank.peer = STOP
    with rank.vote.observed():
        rank.flow.on_epoch_end(ARGUMENTS, rank.state, rank.control)
    rank.vote.end_epoch(rank.control, 3)
    assert read_flags(rank.control) == STOP._replace(should_save=True)


@pytest.mark.parametrize(
    ("ends", "ended"), [((3, 0), True), ((3, 3), False), ((2, 0), False), ((0, 0), False)]
)
def test_the_epoch_ends_where_the_data_of_one_rank_ends(ends: tuple[int, int], ended: bool) -> None:
    """Not if that of all ends, and in the next epoch not again."""
    rank = Rank(ends=ends)
    rank.ends_step()
    assert rank.control.should_epoch_stop is ended
    rank.vote.begin_epoch()
    rank.control.should_epoch_stop = False
    rank.state.global_step = 4
    rank.ends_step()
    assert not rank.control.should_epoch_stop


def test_a_rank_notes_the_step_with_which_its_data_ends() -> None:
    """Also if the loader has no batch left."""
    rank = Rank()
    rank.vote.begin_step(1)
    rank.loading.end_of_dataloader = True
    rank.vote.begin_step(2)
    rank.loading.in_dataloader = False
    rank.vote.begin_step(3)
    assert rank.noted == [(1, 2), (1, 3)]
