"""The watch: what is late is left alone, what is proved is found, and what cannot be seen proves nothing."""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.board import slot_writer
from grpo_run.runtime.board.board import Board
from grpo_run.runtime.detection import flight_recorder
from grpo_run.runtime.detection.detector import SUPERVISOR_PAUSE_SECONDS, HangDetector
from grpo_run.runtime.detection.finding import Finding
from grpo_run.watchdog import processes
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.deadlocks.collectives import CollectiveProgress
from grpo_run.watchdog.observation import Phase, RankState, Slot
from grpo_run.watchdog.processes import MainThread, SessionUsage
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings
from grpo_run.watchdog.stalls.durations import Durations

TIGHT = DeadlineSettings(
    floor_seconds=4, first_floor_seconds=20, first_seconds=20, startup_seconds=20, evaluation_seconds=20,
    ceiling_seconds=40, exit_seconds=4,
)  # fmt: skip
BACKENDS = {"all_reduce": "gloo:all_reduce", "all_gather": "gloo:all_gather", "barrier": "gloo:barrier"}


class World:
    """Ranks of one node on a real board, their recorders and processes; time passes when it is told to."""

    def __init__(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int = 2, *, world_size: int | None = None,
        settings: DeadlineSettings = TIGHT,
    ) -> None:  # fmt: skip
        self.now = 1000.0
        clock = SimpleNamespace(monotonic_ns=lambda: round(self.now * 1e9))
        monkeypatch.setattr(slot_writer, "time", clock)
        monkeypatch.setattr(flight_recorder, "fetch", self._fetch)
        monkeypatch.setattr(processes, "read_main_thread", self._main_thread)
        monkeypatch.setattr(processes, "read_session", self._session)
        monkeypatch.setattr(processes, "members_by_session", lambda pids: {pid: [pid] for pid in pids})
        monkeypatch.setattr(processes, "has_remote_connection", lambda pid: pid - 100 in self.connected)
        self.path = path
        self.board = Board.create(path, ranks)
        self.watch = HangDetector(self.board, settings, clock=lambda: self.now)
        self.world_size = world_size or ranks
        self.frozen: set[int] = set()
        self.connected: set[int] = set()
        self.unreadable: set[int] = set()
        self.begin(0)

    def begin(self, attempt: int) -> None:
        """All ranks start anew and are in the `data` phase of their first `train()` call."""
        self.board.begin_attempt(attempt)
        ranks = range(self.board.slots)
        self.polls: list[float] = []
        self.entries: dict[int, list[dict[str, Any]]] = {rank: [] for rank in ranks}
        self.groups: dict[str, dict[str, str]] = {}
        self.silent: dict[int, str] = {}
        self.cpu = dict.fromkeys(ranks, 10.0)
        self.io: dict[int, int | None] = dict.fromkeys(ranks, 1000)
        self.process_state = dict.fromkeys(ranks, "S")
        self.sequences: Counter[tuple[int, str]] = Counter()
        self.writers = [self.board.writer(r, rank=r, pid=100 + r, attempt=attempt) for r in ranks]
        for writer in self.writers:
            writer.state, writer.train_call, writer.step = RankState.training, 1, 7
            writer.replace(Phase.data)
            writer.publish()
        pids = {rank: 100 + rank for rank in ranks}
        sockets = {rank: f"/run/rank{rank}.sock" for rank in ranks}
        self.watch.begin_attempt(self.board, {rank: rank for rank in ranks}, pids, sockets, self.world_size)

    def issue(
        self, rank: int, operation: str, *, progress: CollectiveProgress = CollectiveProgress.waiting, elements: int = 3,
        line: int = 88, group: str = "0", noted: bool = True,
    ) -> int:  # fmt: skip
        """A rank issues a collective; returns its note's number, 0 for one that C++ issued."""
        self.sequences[rank, group] += 1
        sequence = self.sequences[rank, group]
        self.entries[rank].append(
            {
                "process_group": [group, "default_pg"], "pg_id": 0, "collective_seq_id": sequence,
                "profiling_name": BACKENDS[operation], "input_sizes": [[elements]], "input_dtypes": ["Float"],
                "state": "scheduled", "retired": progress is CollectiveProgress.completed, "thread_id": "1",
            }
        )  # fmt: skip
        if not noted:
            return 0
        return self.writers[rank].collective_log.add(
            group=group, sequence=sequence, operation=operation, sizes=str(elements), dtypes="Float",
            file="/home/user/train.py", line=line, function="main", step=8, progress=progress,
        )  # fmt: skip

    def complete(self, rank: int, note: int) -> None:
        """Its last collective is done."""
        self.entries[rank][-1]["retired"] = True
        self.writers[rank].collective_log.mark(note, CollectiveProgress.completed)

    def slots(self) -> dict[int, Slot | None]:
        """As the supervisor reads them."""
        whole = self.board.has_full_size
        return {
            rank: self.board.read(rank) if whole and rank not in self.unreadable else None
            for rank in range(self.board.slots)
        }

    def look(self) -> Finding | None:
        """One look, at which every interpreter that runs has just beaten."""
        if self.board.has_full_size:
            for rank, writer in enumerate(self.writers):
                if rank not in self.frozen:
                    writer.heartbeat()
        return self.watch.scan(self.slots())

    def go_on(
        self, seconds: float, *, every: float = 0.1, doing: Callable[[], None] = lambda: None
    ) -> Finding | None:
        """Looks for so long; ends with the first finding."""
        until = self.now + seconds
        while self.now < until - 1e-9:
            self.now += every
            doing()
            found = self.look()
            if found is not None:
                return found
        return None

    def _fetch(self, sockets: dict[int, str], seconds: float) -> tuple[dict[int, bytes], dict[int, str]]:
        self.polls.append(self.now)
        failures = {rank: self.silent[rank] for rank in sockets if rank in self.silent}
        answers = {
            rank: json.dumps({"entries": self.entries[rank], "pg_config": self.groups}).encode()
            for rank in sockets
            if rank not in failures
        }
        return answers, failures

    def _main_thread(self, pid: int) -> MainThread | None:
        rank = pid - 100
        return MainThread(state=self.process_state[rank], cpu_seconds=self.cpu[rank])

    def _session(self, pid: int, members: object = None) -> SessionUsage | None:
        rank = pid - 100
        return SessionUsage(members=(pid,), cpu_seconds=self.cpu[rank], io_bytes=self.io[rank])


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    """Makes a world."""
    return lambda *args, **options: World(tmp_path / "board.mmap", monkeypatch, *args, **options)


@pytest.fixture
def world(make: Callable[..., World]) -> World:
    """Two ranks in training."""
    return make()


def mismatch(world: World) -> None:
    """Both ranks have reduced once; then one reduces and the other gathers."""
    for rank in (0, 1):
        world.issue(rank, "all_reduce", progress=CollectiveProgress.completed)
    world.issue(0, "all_reduce", line=88)
    world.issue(1, "all_gather", line=91)


# proof


def test_two_collectives_that_cannot_meet_are_found_within_a_second(world: World) -> None:
    """With both ranks' lines, and when the second of them had come to stand."""
    mismatch(world)
    found = world.go_on(1.0)
    assert found is not None
    assert found.deadlock is not None
    assert found.stall is None
    assert found.deadlock.cause is Cause.collective_mismatch
    assert {rank: place.line for rank, place in found.deadlock.locations.items()} == {0: 88, 1: 91}
    assert 1000.0 <= found.began_at_seconds <= 1000.1 + 1e-6
    assert set(world.watch.recordings) == {0, 1}


def test_a_deadlock_needs_two_polls(world: World) -> None:
    """The first one makes a suspicion only."""
    mismatch(world)
    while not world.polls:
        world.now += 0.1
        assert world.look() is None
    assert world.watch.suspicion is not None
    assert world.go_on(1.0) is not None
    assert len(world.polls) == 2


def test_what_changed_between_two_polls_proves_nothing(world: World) -> None:
    """The recorders moved on although no slot did."""
    mismatch(world)

    def another() -> None:
        for rank in (0, 1):
            world.entries[rank].insert(
                0, {**world.entries[rank][0], "collective_seq_id": 1, "process_group": ["2", ""], "pg_id": 2}
            )

    assert world.go_on(5.0, doing=another) is None
    assert len(world.polls) > 2
    assert world.go_on(6.0) is not None


def test_a_slot_that_moves_between_two_polls_starts_them_over(world: World) -> None:
    """A rank that runs is not in a deadlock, whatever its last note says."""
    mismatch(world)
    assert world.go_on(30.0, doing=world.writers[1].record_work) is None
    assert world.polls == []
    assert world.watch.suspicion is None


def test_a_suspicion_that_is_not_confirmed_goes_away(world: World) -> None:
    """The rank had only been slow to write its next phase."""
    mismatch(world)
    while not world.polls:
        world.go_on(0.1)
    assert world.watch.suspicion is not None
    world.writers[0].enter(Phase.optimizer)
    world.writers[1].enter(Phase.optimizer)
    assert world.look() is None
    assert world.watch.suspicion is None


def test_ranks_that_wait_in_circles_are_found(world: World) -> None:
    """Each has begun what the other has not: two groups in two orders."""
    world.groups = {"1": {"ranks": "[0, 1]"}, "2": {"ranks": "[0, 1]"}}
    world.issue(0, "all_reduce", group="1")
    world.issue(1, "all_reduce", group="2")
    found = world.go_on(1.0)
    assert found is not None
    assert found.deadlock is not None
    assert found.deadlock.cause is Cause.collective_missing_rank


def test_a_rank_that_left_is_who_the_others_wait_for(world: World) -> None:
    """Its process has ended well; its notes on the board outlive it."""
    for rank in (0, 1):
        world.issue(rank, "all_reduce", progress=CollectiveProgress.completed)
    world.issue(0, "all_reduce")
    world.writers[1].state = RankState.done
    world.writers[1].publish()
    world.watch.rank_exited(1)
    found = world.go_on(1.0)
    assert found is not None
    assert found.deadlock is not None
    assert (found.deadlock.cause, found.deadlock.culprits) == (Cause.rank_exited_early, (1,))


def test_a_rank_past_its_last_line_may_still_meet_the_others(world: World) -> None:
    """Its threads, and its exit handlers, until its process has ended."""
    for rank in (0, 1):
        world.issue(rank, "all_reduce", progress=CollectiveProgress.completed)
    world.issue(0, "all_reduce")
    world.writers[1].state = RankState.done
    world.writers[1].publish()
    assert world.go_on(3.5) is None
    assert world.polls
    world.watch.rank_exited(1)
    found = world.go_on(6.0)
    assert found is not None
    assert found.deadlock is not None
    assert found.deadlock.culprits == (1,)


def test_a_rank_alone_on_its_node_is_never_proved_wrong(make: Callable[..., World]) -> None:
    """Those it waits for are on other nodes, and are late as far as can be seen from here."""
    world = make(1, world_size=2)
    world.issue(0, "all_reduce")
    assert world.go_on(300.0, every=0.5) is None
    assert world.polls


# lateness


@pytest.mark.parametrize("phase", [Phase.generate, Phase.reward, Phase.data, Phase.eval])
def test_a_rank_that_is_merely_late_is_left_alone(world: World, phase: Phase) -> None:
    """For as long as it works; the other one waits in a collective, and nobody is wrong."""
    world.issue(0, "all_reduce")
    world.writers[1].replace(phase)
    assert world.go_on(1200.0, every=1.0, doing=world.writers[1].record_work) is None
    assert world.watch.suspicion is None


def test_a_late_rank_that_stands_still_is_left_alone_until_its_deadline(world: World) -> None:
    """Polls go on, and prove nothing."""
    world.issue(0, "all_reduce")
    world.writers[1].replace(Phase.reward)
    assert world.go_on(19.5) is None
    assert len(world.polls) > 2
    found = world.go_on(2.0)
    assert found is not None
    assert found.stall is not None
    assert (found.stall.culprits, found.stall.waiters, found.stall.phase) == ((1,), (0,), Phase.reward)
    assert found.began_at_seconds == pytest.approx(1000.0)


def test_a_deadline_is_confirmed_by_a_second_look(world: World) -> None:
    """A single one may have met the rank on its way."""
    world.issue(0, "all_reduce")
    world.writers[1].replace(Phase.reward)
    while world.watch.suspicion is None:
        assert world.go_on(0.1) is None
    assert world.go_on(0.1) is not None


def test_nobody_is_asked_before_something_is_overdue(world: World) -> None:
    """The first look at the clocks takes everybody for working, which asks no rank; then all are asked."""
    for rank in (0, 1):
        world.writers[rank].replace(Phase.reward)
    assert world.go_on(19.5) is None
    assert world.polls == []
    found = world.go_on(2.0)
    assert found is not None
    assert len(world.polls) == 2
    assert min(world.polls) >= 1020.0


def test_polls_grow_rare_while_a_long_phase_goes_on(world: World) -> None:
    """Three hundred looks over thirty seconds: a dozen polls at most, and none closer than before."""
    world.writers[0].collective_log.add(
        group="0", sequence=1, operation="all_reduce", sizes="3", dtypes="Float", file="t.py", line=1,
        function="f", step=8, progress=CollectiveProgress.waiting,
    )  # fmt: skip
    patient = DeadlineSettings()
    world.watch = HangDetector(world.board, patient, clock=lambda: world.now)
    world.watch.begin_attempt(world.board, {0: 0, 1: 1}, {0: 100, 1: 101}, {0: "a", 1: "b"}, 2)
    world.writers[1].replace(Phase.generate)
    assert world.go_on(30.0) is None
    assert 4 <= len(world.polls) <= 12
    gaps = [after - before for before, after in itertools.pairwise(world.polls)]
    assert gaps == sorted(gaps)
    assert gaps[-1] <= 5.2


def test_nobody_is_polled_while_no_rank_is_in_a_collective(world: World) -> None:
    """However long they all stand still."""
    for rank in (0, 1):
        note = world.issue(rank, "all_reduce")
        world.complete(rank, note)
        world.writers[rank].replace(Phase.generate)
    assert world.go_on(15.0) is None
    assert world.polls == []


def test_nobody_is_polled_while_all_but_one_rank_move(make: Callable[..., World]) -> None:
    """One rank that waits for others at work is late at most."""
    world = make(3)
    world.issue(0, "all_reduce")

    def work() -> None:
        for writer in world.writers[1:]:
            writer.record_work()

    assert world.go_on(30.0, doing=work) is None
    assert world.polls == []


def test_a_rank_that_newly_stands_still_is_polled_for_at_once(make: Callable[..., World]) -> None:
    """However rare polls had become: it may be the one that makes the deadlock."""
    world = make(3, settings=DeadlineSettings())
    world.issue(0, "all_reduce")
    world.issue(1, "all_reduce")
    assert world.go_on(20.0, doing=world.writers[2].record_work) is None
    rare = len(world.polls)
    world.issue(2, "all_gather", line=91)
    began = world.now
    found = world.go_on(1.0)
    assert found is not None
    assert found.deadlock is not None
    assert world.now - began < 0.6
    assert len(world.polls) == rare + 2


def test_gradients_of_ddp_are_watched_too(world: World) -> None:
    """C++ issues them: no note tells that the rank waits, only its phase that it may."""
    for rank, operation in ((0, "all_reduce"), (1, "all_gather")):
        world.writers[rank].replace(Phase.forward_backward)
        world.issue(rank, operation, noted=False)
    found = world.go_on(1.0)
    assert found is not None
    assert found.deadlock is not None


@pytest.mark.parametrize("state", ["R", "D", "T"])
def test_a_thread_that_may_run_is_not_known_to_wait_in_gradients(world: World, state: str) -> None:
    """It has used nothing because others have the processor, or a disk is slow; one poll asleep is not enough."""
    world.groups = {"1": {"ranks": "[0, 1]"}, "2": {"ranks": "[0, 1]"}}
    for rank, group in ((0, "1"), (1, "2")):
        world.writers[rank].replace(Phase.forward_backward)
        world.issue(rank, "all_reduce", progress=CollectiveProgress.enqueued, noted=False, group=group)

    def flicker() -> None:
        for rank in (0, 1):
            world.process_state[rank] = state if len(world.polls) % 2 else "S"

    assert world.go_on(8.0, doing=flicker) is None
    assert len(world.polls) > 2
    world.process_state = {0: "S", 1: "S"}  # polls have grown rare, and two of them have to see it
    found = world.go_on(11.0)
    assert found is not None
    assert found.deadlock is not None


def test_a_rank_that_flaps_does_not_make_polls_frequent(make: Callable[..., World]) -> None:
    """It counts now and then, and stands still in between: who waits for it keeps its rarity."""
    world = make(2, settings=DeadlineSettings())
    world.issue(0, "all_reduce")
    looks = itertools.count()

    def sometimes() -> None:
        if next(looks) % 6 == 0:
            world.writers[1].record_work()

    assert world.go_on(30.0, doing=sometimes) is None
    assert world.polls
    assert len(world.polls) <= 16


@pytest.mark.parametrize("phase", [Phase.vote, Phase.score, Phase.generate])
def test_a_wait_in_an_older_note_is_seen(world: World, phase: Phase) -> None:
    """The rank issued another collective, asynchronously, before it came to wait for this one; nobody else waits."""
    for rank in (0, 1):
        world.issue(rank, "all_reduce", progress=CollectiveProgress.completed)
    world.issue(0, "all_reduce")
    world.issue(0, "all_gather", progress=CollectiveProgress.enqueued)
    world.issue(1, "all_gather", progress=CollectiveProgress.enqueued)
    world.writers[0].replace(phase)
    found = world.go_on(2.0)
    assert found is not None
    assert found.deadlock is not None


def test_a_rank_that_leaves_is_looked_into_at_once(make: Callable[..., World]) -> None:
    """However rare polls had become while it was merely late."""
    world = make(2, settings=DeadlineSettings())
    world.issue(0, "all_reduce")
    world.writers[1].replace(Phase.reward)
    assert world.go_on(21.0) is None
    world.watch.rank_exited(1)
    world.writers[1].state = RankState.done
    world.writers[1].publish()
    left = world.now
    found = world.go_on(10.0)
    assert found is not None
    assert found.deadlock is not None
    assert found.deadlock.culprits == (1,)
    assert world.now - left < 1.5


# blindness


@pytest.mark.parametrize("silent", [{0}, {1}, {0, 1}])
def test_ranks_whose_records_cannot_be_had_are_not_proved_wrong(world: World, silent: set[int]) -> None:
    """It is said of each, with the reason."""
    mismatch(world)
    world.silent = dict.fromkeys(silent, "connection refused")
    assert world.go_on(19.0) is None
    assert world.watch.blind == dict.fromkeys(silent, "no collective records: connection refused")
    assert world.watch.suspicion is None


def test_an_answer_that_is_not_understood_is_blindness(world: World) -> None:
    """It names the field, and proves nothing."""
    mismatch(world)
    world.entries[1][-1]["collective_seq_id"] = "many"
    assert world.go_on(10.0) is None
    assert "entries.1.collective_seq_id" in world.watch.blind[1]
    assert 0 not in world.watch.blind


def test_records_that_can_be_had_again_end_the_blindness(world: World) -> None:
    """And the proof comes with them."""
    mismatch(world)
    world.silent = {1: "no answer within 0.5 s"}
    assert world.go_on(10.0) is None
    world.silent = {}
    found = world.go_on(10.0)
    assert found is not None
    assert found.deadlock is not None
    assert world.watch.blind == {}


@pytest.mark.parametrize("unreadable", [{0}, {1}, {0, 1}])
def test_a_slot_that_cannot_be_read_is_no_reason(world: World, unreadable: set[int]) -> None:
    """Neither for a proof nor, while others wait for it, for a deadline."""
    mismatch(world)
    world.unreadable = unreadable
    assert world.go_on(200.0, every=0.5) is None
    assert world.watch.suspicion is None
    assert set(world.watch.blind) >= unreadable
    for rank in unreadable:
        assert world.watch.blind[rank] == "its slot on the board cannot be read"


def test_a_slot_that_can_be_read_again_is_seen_again(world: World) -> None:
    """The note about it goes."""
    world.unreadable = {1}
    world.go_on(1.0)
    world.unreadable = set()
    world.go_on(1.0)
    assert world.watch.blind == {}


def test_a_board_that_was_cut_short_blinds_and_kills_nobody(world: World) -> None:
    """Nothing is read past the file's end, which would end the supervisor with a SIGBUS."""
    mismatch(world)
    os.truncate(world.path, 4096)
    assert world.go_on(200.0, every=0.5) is None
    assert set(world.watch.blind) == {0, 1}
    assert world.watch.phase_durations.by_rank() == {}
    assert world.watch.collective_logs() == {}
    assert world.watch.phase_durations.merged() == {}


def test_a_process_that_cannot_be_read_is_judged_by_the_rest(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deadline passes all the same; nothing is said about its interpreter."""
    monkeypatch.setattr(processes, "read_main_thread", lambda pid: None)
    world.issue(0, "all_reduce")
    world.writers[1].replace(Phase.reward)
    found = world.go_on(25.0)
    assert found is not None
    assert found.stall is not None
    assert (found.stall.cause, found.stall.culprits) == (Cause.reward_stall, (1,))


# a supervisor that was itself stopped


def suspect_a_stall(world: World) -> None:
    """Until rank 1 is suspected to hang in its reward, and before that is confirmed."""
    world.issue(0, "all_reduce")
    world.writers[1].replace(Phase.reward)
    while world.watch.suspicion is None:
        assert world.go_on(0.1) is None


def test_a_suspicion_does_not_reach_over_a_gap(world: World) -> None:
    """It goes, rather than be confirmed by what the rank did not do while nothing ran."""
    suspect_a_stall(world)
    world.now += 60.0
    assert world.look() is None
    assert world.watch.suspicion is None


def test_a_gap_after_the_scripts_end_is_not_silence(world: World) -> None:
    """The machine may have been stopped while processes were on their way out."""
    at_the_end(world)
    assert world.look() is None
    world.now += 60.0
    assert world.look() is None


def test_time_in_which_nobody_looked_counts_for_nothing(world: World) -> None:
    """The whole machine may have been stopped: after a jump every clock starts over."""
    world.issue(0, "all_reduce")
    world.writers[1].replace(Phase.reward)
    assert world.go_on(19.0) is None
    world.now += 60.0
    assert world.look() is None
    assert world.watch.suspicion is None
    assert world.go_on(19.0) is None
    assert world.go_on(3.0) is not None


def test_a_proof_does_not_reach_over_a_gap(world: World) -> None:
    """Two polls with a stopped supervisor between them are one."""
    mismatch(world)
    while not world.polls:
        world.go_on(0.1)
    world.now += SUPERVISOR_PAUSE_SECONDS + 1.0
    assert world.look() is None
    assert len(world.polls) == 1
    assert world.go_on(1.0) is not None
    assert len(world.polls) == 3


def test_looks_two_seconds_apart_are_looks(world: World) -> None:
    """A slow machine is not a stopped one."""
    mismatch(world)
    assert world.go_on(10.0, every=1.9) is not None


# deadlines


def test_a_rank_that_works_slowly_is_not_overdue(world: World) -> None:
    """Each forward pass that is counted starts the clock over."""
    for writer in world.writers:
        writer.replace(Phase.generate)
    ticks = iter(range(10**6))

    def sometimes() -> None:
        if next(ticks) % 20 == 0:
            for writer in world.writers:
                writer.record_work()

    assert world.go_on(200.0, every=0.5, doing=sometimes) is None


def test_a_suspected_stall_that_goes_on_is_suspected_no_more(world: World) -> None:
    """All ranks are in another phase, and in time."""
    suspect_a_stall(world)
    for writer in world.writers:
        writer.replace(Phase.optimizer)
    assert world.go_on(1.0) is None
    assert world.watch.suspicion is None


@pytest.mark.parametrize("silent", [{}, {0: "connection refused"}])
def test_a_rank_that_waits_in_gradients_for_a_late_one_is_not_blamed(
    world: World, silent: dict[int, str]
) -> None:
    """It is past its own deadline because of the other, which works; with its recorder heard or not."""
    world.watch.phase_durations.earlier_attempts = {Phase.forward_backward: Durations.of([1.0] + [0.2] * 100)}
    for _ in range(2):  # its first of the attempt is over
        world.writers[0].replace(Phase.forward_backward)
    world.issue(0, "all_reduce", noted=False)
    world.silent = silent
    world.writers[1].replace(Phase.data)
    assert world.go_on(600.0, every=0.5, doing=world.writers[1].record_work) is None
    assert world.watch.suspicion is None


def test_a_rank_that_waits_for_an_older_collective_is_not_blamed(world: World) -> None:
    """Its last note is of another one, which it issued asynchronously."""
    for rank in (0, 1):
        world.issue(rank, "all_reduce", progress=CollectiveProgress.completed)
    world.issue(0, "all_reduce")
    world.issue(0, "all_reduce", progress=CollectiveProgress.enqueued)
    world.writers[0].replace(Phase.generate)
    world.writers[1].replace(Phase.reward)
    assert world.go_on(300.0, every=0.5, doing=world.writers[1].record_work) is None


def test_a_script_that_never_begins_to_train_is_found(world: World) -> None:
    """It has no phase open: start-up has a deadline of its own."""
    for writer in world.writers:
        writer.state = RankState.starting
        writer.leave(Phase.data)
        writer.publish()
    assert all(slot is not None and slot.phases == () for slot in world.slots().values())
    found = world.go_on(60.0, every=0.5)
    assert found is not None
    assert found.stall is not None
    assert (found.stall.phase, found.stall.culprits) == (Phase.startup, (0, 1))


def test_a_script_that_hangs_between_two_calls_is_found(world: World) -> None:
    """After the ceiling: nothing can be learned of a script's own time."""
    for writer in world.writers:
        writer.state = RankState.between
        writer.replace(Phase.idle)
    assert world.go_on(39.0, every=0.5) is None
    found = world.go_on(21.0, every=0.5)
    assert found is not None
    assert found.stall is not None
    assert found.stall.phase is Phase.idle


def test_a_checkpoint_that_still_writes_is_not_overdue(world: World) -> None:
    """Bytes are progress where bytes are the work, and nowhere else."""
    world.issue(0, "all_reduce")
    world.writers[1].replace(Phase.checkpoint)

    def write() -> None:
        world.io[1] = (world.io[1] or 0) + 64 * 1024

    assert world.go_on(100.0, every=0.5, doing=write) is None
    found = world.go_on(25.0, every=0.5)
    assert found is not None
    assert found.stall is not None
    assert found.stall.cause is Cause.checkpoint_stall
    world.begin(1)
    world.issue(0, "all_reduce")
    world.writers[1].replace(Phase.reward)
    assert world.go_on(25.0, every=0.5, doing=write) is not None


@pytest.mark.parametrize("phase", [Phase.startup, Phase.data, Phase.eval, Phase.idle])
def test_an_open_ended_phase_is_not_overdue_while_its_session_computes(world: World, phase: Phase) -> None:
    """A tokenizer at work, an evaluation of the script's own: nothing shows but processor time."""
    world.writers[1].replace(phase)
    world.issue(0, "all_reduce")

    def compute() -> None:
        world.cpu[1] += 0.4

    assert world.go_on(200.0, every=0.5, doing=compute) is None
    found = world.go_on(61.0, every=0.5)
    assert found is not None
    assert found.stall is not None
    assert found.stall.culprits == (1,)


def test_a_reward_that_only_computes_is_overdue(world: World) -> None:
    """A regular expression that never ends."""
    world.writers[1].replace(Phase.reward)
    world.issue(0, "all_reduce")

    def compute() -> None:
        world.cpu[1] += 0.4

    found = world.go_on(25.0, every=0.5, doing=compute)
    assert found is not None
    assert found.stall is not None
    assert (found.stall.culprits, found.stall.phase) == ((1,), Phase.reward)


def test_a_rank_that_issues_collectives_is_not_overdue(world: World) -> None:
    """Whatever phase it is in."""
    for writer in world.writers:
        writer.replace(Phase.generate)

    def gather() -> None:
        for rank in (0, 1):
            world.complete(rank, world.issue(rank, "all_gather"))

    assert world.go_on(120.0, every=0.5, doing=gather) is None
    found = world.go_on(25.0, every=0.5)
    assert found is not None
    assert found.stall is not None


def test_a_stopped_process_is_named_as_such(world: World) -> None:
    """Also when its slot says that it waits."""
    world.issue(0, "all_reduce")
    world.writers[1].replace(Phase.reward)
    world.process_state[1] = "T"
    world.frozen = {1}
    found = world.go_on(25.0)
    assert found is not None
    assert found.stall is not None
    assert (found.stall.cause, found.stall.culprits) == (Cause.interpreter_stuck, (1,))
    assert "SIGSTOP" in found.stall.sentence


def test_an_interpreter_that_does_not_run_is_named_as_such(world: World) -> None:
    """Its beat is old."""
    world.issue(0, "all_reduce")
    world.writers[1].replace(Phase.reward)
    world.frozen = {1}
    found = world.go_on(25.0)
    assert found is not None
    assert found.stall is not None
    assert found.stall.cause is Cause.interpreter_stuck


def test_a_sleeper_in_the_kernel_is_marked(world: World) -> None:
    """A restart would find its device taken."""
    world.issue(0, "all_reduce")
    world.writers[1].replace(Phase.reward)
    world.process_state[1] = "D"
    found = world.go_on(25.0)
    assert found is not None
    assert found.stall is not None
    assert found.stall.uninterruptible


def test_ranks_that_all_wait_in_gradients_are_blamed_on_nobody(world: World) -> None:
    """The recorders are asked before anybody is named: both wait in C++."""
    for rank in (0, 1):
        world.writers[rank].replace(Phase.forward_backward)
        world.issue(rank, "all_reduce", noted=False)
    found = world.go_on(25.0)
    assert found is not None
    assert found.stall is not None
    assert (found.stall.culprits, found.stall.cause) == ((), Cause.no_progress)


def test_what_was_learned_sets_the_deadline(world: World) -> None:
    """Rewards of a second, a hundred times, leave no room for twenty."""
    world.watch.phase_durations.earlier_attempts = {Phase.reward: Durations.of([1.0] + [0.2] * 100)}
    world.issue(0, "all_reduce")
    for _ in range(2):  # its first reward of the attempt is over
        world.writers[1].replace(Phase.reward)
    found = world.go_on(12.0)
    assert found is not None
    assert found.stall is not None
    assert found.stall.deadline_seconds < 10


def overdue_after_rewards_of_a_second(world: World) -> Finding:
    """Rank 1 hangs in a reward, while the other waits."""
    world.issue(0, "all_reduce")
    for _ in range(2):  # its first reward of the attempt is over
        world.writers[1].replace(Phase.reward)
    found = world.go_on(38.0)
    assert found is not None
    return found


def test_a_phase_that_was_ended_for_its_deadline_is_given_twice_as_long(world: World) -> None:
    """If it was only slow, the next attempt shows it; twice in a row is twice as long again."""
    world.watch.phase_durations.earlier_attempts = {Phase.reward: Durations.of([1.0] + [0.2] * 100)}
    waited = []
    for attempt in (1, 2):
        stall = overdue_after_rewards_of_a_second(world).stall
        assert stall is not None
        waited.append(stall.waited_seconds)
        world.watch.phase_durations.earlier_attempts = world.watch.phase_durations.merged()
        world.begin(attempt)
    assert waited[1] == pytest.approx(2 * waited[0], abs=1.5)


def test_what_was_not_ended_is_learned_as_it_was(world: World) -> None:
    """A stall that is only suspected is no lesson, and none of an earlier attempt's is one again."""
    world.watch.phase_durations.earlier_attempts = {Phase.reward: Durations.of([1.0] + [0.2] * 100)}
    world.issue(0, "all_reduce")
    for _ in range(2):
        world.writers[1].replace(Phase.reward)
    while world.watch.suspicion is None:
        assert world.go_on(0.1) is None
    before = world.watch.phase_durations.merged()[Phase.reward].max_seconds
    assert before < 1.1
    assert world.go_on(1.0) is not None
    assert world.watch.phase_durations.merged()[Phase.reward].max_seconds > before
    world.begin(1)
    assert world.watch.phase_durations.merged()[Phase.reward].max_seconds == before


# the script's end


def at_the_end(world: World) -> None:
    """All scripts have run their last line."""
    for writer in world.writers:
        writer.state = RankState.done
        writer.publish()


def test_a_process_that_does_nothing_after_the_end_is_found(world: World) -> None:
    """With the rank that is left, after the deadline for leaving."""
    at_the_end(world)
    world.watch.rank_exited(0)
    assert world.go_on(3.5) is None
    found = world.go_on(1.5)
    assert found is not None
    assert found.stall is not None
    assert found.stall.culprits == (1,)
    assert "training was complete" in found.stall.sentence


def test_a_connected_process_is_waited_for_longer_after_the_end(world: World) -> None:
    """An upload may wait for its answer."""
    at_the_end(world)
    world.connected = {0}
    assert world.go_on(299.0, every=0.5) is None
    assert world.go_on(5.0, every=0.5) is not None


def test_a_suspected_stall_is_forgotten_at_the_end(world: World) -> None:
    """The script came to its last line after all."""
    suspect_a_stall(world)
    at_the_end(world)
    assert world.go_on(0.1) is None
    assert world.watch.suspicion is None


@pytest.mark.parametrize("what", ["cpu", "io"])
def test_a_process_that_still_works_after_the_end_is_left_alone(world: World, what: str) -> None:
    """An upload of hours is fine."""
    at_the_end(world)

    def work() -> None:
        for rank in (0, 1):
            if what == "cpu":
                world.cpu[rank] += 0.5
            else:
                world.io[rank] = (world.io[rank] or 0) + 64 * 1024

    assert world.go_on(600.0, every=0.5, doing=work) is None


def test_a_process_whose_bytes_cannot_be_read_after_the_end_is_left_alone(world: World) -> None:
    """Unknown is not zero: it may be uploading."""
    at_the_end(world)
    world.io = {0: None, 1: None}
    assert world.go_on(60.0, every=0.5) is None


# attempts


def test_nothing_of_an_earlier_attempt_survives(world: World) -> None:
    """No suspicion, no poll, no blindness, no record: two polls are needed again."""
    mismatch(world)
    while not world.polls:
        world.go_on(0.1)
    world.unreadable = {1}
    world.look()
    world.unreadable = set()
    assert world.watch.suspicion
    assert world.watch.blind
    assert world.watch.recordings
    world.begin(1)
    assert world.watch.suspicion is None
    assert world.watch.blind == {}
    assert world.watch.recordings == {}
    assert world.watch.collective_logs() == {0: [], 1: []}
    mismatch(world)
    while not world.polls:
        assert world.go_on(0.1) is None
    assert world.go_on(1.0) is not None


def test_a_deadline_of_an_earlier_attempt_does_not_go_on(world: World) -> None:
    """Its suspicion is not confirmed by the next attempt's first look."""
    world.issue(0, "all_reduce")
    world.writers[1].replace(Phase.reward)
    while world.watch.suspicion is None:
        world.go_on(0.1)
    world.begin(1)
    world.issue(0, "all_reduce")
    world.writers[1].replace(Phase.reward)
    assert world.go_on(19.0) is None


def test_what_is_learned_adds_up_over_attempts(world: World) -> None:
    """The last attempt's, as it was written down, and then this one's."""
    for writer in world.writers:
        for seconds in (3.0, 1.0, 1.0):
            writer.replace(Phase.reward)
            world.now += seconds
            writer.replace(Phase.data)
    first = world.watch.phase_durations.merged()[Phase.reward]
    assert (first.count, first.first_seconds, first.max_seconds) == (
        2,
        pytest.approx(3.0),
        pytest.approx(1.0),
    )
    world.watch.phase_durations.earlier_attempts = world.watch.phase_durations.merged()
    world.begin(1)
    assert world.watch.phase_durations.merged()[Phase.reward] == first
    for seconds in (5.0, 2.0):
        world.writers[0].replace(Phase.reward)
        world.now += seconds
        world.writers[0].replace(Phase.data)
    both = world.watch.phase_durations.merged()[Phase.reward]
    assert (both.count, both.first_seconds, both.max_seconds) == (3, pytest.approx(5.0), pytest.approx(2.0))


def test_learning_twice_counts_once(world: World) -> None:
    """It is asked for at every look."""
    world.writers[0].replace(Phase.reward)
    world.writers[0].replace(Phase.reward)
    world.writers[0].replace(Phase.data)
    assert world.watch.phase_durations.merged() == world.watch.phase_durations.merged()
    assert world.watch.phase_durations.merged()[Phase.reward].count == 1


# positions, for a fault that exits tell of


def test_positions_of_the_gone_come_from_their_notes(world: World) -> None:
    """Nobody asks a dead rank's server; a living one that does not answer is unknown."""
    mismatch(world)
    world.silent = {0: "reset"}
    positions = world.watch.positions(world.slots(), gone={0: False, 1: True})
    assert positions[0].records is None
    assert positions[1].gone
    assert [one.operation for one in positions[1].records or ()] == ["all_reduce", "all_gather"]
    assert world.watch.blind == {0: "no collective records: reset"}


def test_the_position_of_a_gone_rank_whose_slot_is_lost_is_unknown(world: World) -> None:
    """No records are not the same as none issued."""
    mismatch(world)
    world.unreadable = {1}
    assert world.watch.positions(world.slots(), gone={0: False, 1: True})[1].records is None


def test_notes_are_plain_values(world: World) -> None:
    """They go into a file as JSON."""
    world.issue(0, "all_reduce", line=88)
    (note,) = json.loads(json.dumps(world.watch.collective_logs()[0]))
    assert (note["operation"], note["progress"], note["at"]) == (
        "all_reduce",
        "waiting",
        "train.py:88 in main",
    )
