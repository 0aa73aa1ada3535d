"""Memory by phase: every figure belongs to one phase, and measuring has a bounded cost."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.runtime.rank.memory.device import DeviceReading
from grpo_run.runtime.rank.memory.phases import (
    ADVANCE_NS,
    SHARE_ON_HOST,
    SHARE_WITH_DEVICE,
    HostReading,
    PhaseAccounting,
    ResidentMemory,
)
from grpo_run.watchdog.memory.phase_memory import PhaseMemory, RankMemory
from grpo_run.watchdog.observation import Phase

MIB = 2**20


class Device:
    """A device whose figures the test sets; a reading begins a new peak."""

    def __init__(self) -> None:
        self.allocated, self.peak, self.retries, self.ooms = 0, 0, 0, 0
        self.error: Exception | None = None

    def use(self, peak: int, left: int) -> None:
        """Use memory for a moment, and keep some of it."""
        self.allocated, self.peak = left, max(self.peak, peak)

    def read(self) -> DeviceReading | None:
        """See `DeviceMemory`."""
        if self.error is not None:
            raise self.error
        peak, self.peak = max(self.peak, self.allocated), self.allocated
        return DeviceReading(
            capacity=1000, allocated=self.allocated, reserved=self.allocated + 5, inactive_split=3,
            peak_allocated=peak, peak_reserved=peak + 5, retries=self.retries, ooms=self.ooms,
        )  # fmt: skip


class Clock:
    """Nanoseconds; every look at it takes some."""

    def __init__(self, cost_ns: int = 0) -> None:
        self.now, self.cost_ns = 0, cost_ns

    def __call__(self) -> int:
        self.now += self.cost_ns
        return self.now


class Rank:
    """A rank with a slot and its accounting."""

    def __init__(self, path: Path, *, cost_ns: int = 0) -> None:
        self.board = Board.create(path, 1)
        self.slot: SlotWriter = self.board.writer(0, rank=0, pid=1, attempt=0)
        self.device, self.clock = Device(), Clock(cost_ns)
        self.resident, self.most_resident = 100, 100
        self.warnings: list[str] = []
        self.accounting = PhaseAccounting(
            self.slot.memory_area, self.device.read, self.read, warn=self.warnings.append, clock=self.clock
        )
        self.slot.on_change = lambda ended, begun: self.accounting.changed(ended)

    def read(self) -> HostReading:
        """The rank's memory on the host."""
        return HostReading(self.resident, self.resident // 2, self.most_resident)

    @property
    def memory(self) -> RankMemory:
        """What a reader of the board sees."""
        memory = self.board.rank_memory(0)
        assert memory is not None
        return memory

    def phase(self, phase: Phase) -> PhaseMemory:
        """What it sees of a phase."""
        return self.memory.phases[phase]


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    """A rank whose measurements take no time."""
    return Rank(tmp_path / "board.mmap")


def test_each_phase_has_the_peak_of_its_own_time(rank: Rank) -> None:
    """Also if another phase runs inside it, before it goes on."""
    rank.slot.replace(Phase.data)
    rank.slot.enter(Phase.score)
    rank.device.use(peak=300, left=100)
    rank.slot.enter(Phase.generate)
    rank.device.use(peak=900, left=150)
    rank.slot.leave(Phase.generate)
    rank.device.use(peak=400, left=120)
    rank.slot.leave(Phase.score)
    rank.slot.replace(Phase.forward_backward)
    rank.device.use(peak=700, left=200)
    rank.slot.replace(Phase.optimizer)
    peaks = {phase.name: memory.peak_allocated_bytes for phase, memory in rank.memory.phases.items()}
    assert peaks == {"data": 120, "score": 400, "generate": 900, "forward_backward": 700}
    assert rank.phase(Phase.score).allocated_bytes == 120
    assert rank.phase(Phase.generate).allocated_bytes == 150
    assert (rank.memory.allocated_bytes, rank.memory.peak_allocated_bytes) == (200, 900)


def test_an_exception_leaves_the_peak_to_the_phase_that_raised(rank: Rank) -> None:
    """The last measurement is made when the script has ended, by then its tensors are freed."""
    rank.slot.replace(Phase.forward_backward)
    rank.device.use(peak=990, left=100)
    rank.device.ooms = 1
    rank.accounting.script_raised(rank.slot.running)
    assert rank.phase(Phase.forward_backward).peak_allocated_bytes == 990
    assert rank.phase(Phase.forward_backward).allocated_bytes == 100
    assert rank.memory.ooms == 1


def test_retries_belong_to_their_phase_and_survive_a_reset_by_the_script(rank: Rank) -> None:
    """`torch.cuda.reset_accumulated_memory_stats` sets the allocator's counters back."""
    rank.slot.replace(Phase.generate)
    rank.device.retries = 3
    rank.slot.replace(Phase.forward_backward)
    rank.device.retries = 1
    rank.slot.replace(Phase.generate)
    rank.device.retries = 2
    rank.slot.replace(Phase.data)
    assert (rank.phase(Phase.generate).retries, rank.phase(Phase.forward_backward).retries) == (4, 1)
    assert rank.memory.retries == 5


def test_a_peak_on_the_host_is_known_if_it_is_the_highest_of_the_process(rank: Rank) -> None:
    """The kernel keeps no other; a lower one counts as the memory at the end of the phase."""
    rank.slot.replace(Phase.generate)
    rank.resident, rank.most_resident = 150, 800
    rank.slot.replace(Phase.forward_backward)
    rank.resident = 200
    rank.slot.replace(Phase.optimizer)
    assert (rank.phase(Phase.generate).peak_resident_bytes, rank.phase(Phase.generate).resident_bytes) == (
        800,
        150,
    )
    assert rank.phase(Phase.forward_backward).peak_resident_bytes == 200


def test_measuring_takes_its_share_of_the_time_at_most(tmp_path: Path) -> None:
    """Whole steps are left out: no phase has the figures of another one."""
    rank = Rank(tmp_path / "board.mmap", cost_ns=100_000)
    steps, step_ns = 400, 50_000_000
    for _ in range(steps):
        for phase in (Phase.data, Phase.forward_backward, Phase.vote, Phase.optimizer):
            rank.device.use(peak=100 * phase, left=10)
            rank.slot.replace(phase)
            rank.clock.now += step_ns // 4
        rank.accounting.step_ended()
    readings = {phase: memory.readings for phase, memory in rank.memory.phases.items()}
    assert len(set(readings.values()) - {max(readings.values()) - 1, max(readings.values())}) == 0
    assert 10 < max(readings.values()) < steps
    assert rank.memory.spent_seconds <= SHARE_WITH_DEVICE * steps * step_ns / 1e9 + ADVANCE_NS / 1e9 + 0.002
    assert SHARE_ON_HOST < 0.01


def test_a_peak_of_steps_that_were_not_measured_belongs_to_no_phase(tmp_path: Path) -> None:
    """It counts for the rank only."""
    rank = Rank(tmp_path / "board.mmap", cost_ns=3_000_000)
    rank.accounting.step_ended()
    rank.slot.replace(Phase.data)
    rank.slot.replace(Phase.forward_backward)
    rank.accounting.step_ended()
    rank.device.use(peak=999, left=10)
    rank.slot.replace(Phase.optimizer)
    rank.clock.now += 100_000_000_000
    rank.accounting.step_ended()
    rank.device.use(peak=50, left=10)
    rank.slot.replace(Phase.data)
    assert rank.memory.peak_allocated_bytes == 999
    assert {memory.peak_allocated_bytes for memory in rank.memory.phases.values()} == {0, 50}


def test_an_allocator_that_cannot_be_read_ends_measuring_and_not_the_script(rank: Rank) -> None:
    """It is said once."""
    rank.slot.replace(Phase.data)
    rank.device.error = RuntimeError("no statistics")
    for _ in range(3):
        rank.slot.replace(Phase.generate)
        rank.accounting.step_ended()
    rank.accounting.script_raised(Phase.generate)
    assert rank.warnings == ["memory is not measured any more: RuntimeError: no statistics"]


def test_the_hosts_figures_are_those_of_this_process() -> None:
    """A block of memory is in both figures while it is used, and in the highest one afterwards."""
    host = ResidentMemory()
    before = host.read()
    block = bytearray(b"x") * (64 * MIB)
    shared = mmap.mmap(-1, 64 * MIB)
    shared[:] = b"x" * len(shared)
    during = host.read()
    del block
    shared.close()
    after = host.read()
    for earlier in (before, after):
        assert during.resident - earlier.resident > 120 * MIB
        assert 60 * MIB < during.anonymous - earlier.anonymous < 120 * MIB
    assert after.most_resident >= during.most_resident >= during.resident - 4 * MIB


def test_the_memory_at_the_end_of_a_step_is_returned_with_its_own_peak(rank: Rank) -> None:
    """Cleanup looks at it; the peak is that of the step, not of the attempt."""
    for peak in (900, 300):
        rank.slot.replace(Phase.data)
        rank.device.use(peak=peak, left=40)
        rank.slot.replace(Phase.optimizer)
        rank.slot.replace(Phase.data)
        memory = rank.accounting.step_ended()
        assert memory is not None
        assert (memory.peak_allocated, memory.allocated, memory.reserved) == (peak, 40, 45)
        assert (memory.anonymous, memory.capacity) == (50, 1000)
