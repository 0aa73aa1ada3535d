"""A process that does nothing after the script's last line is found; one that works or may work is not."""

from __future__ import annotations

from support.builders.runtime.detector_world import TIGHT, World, at_the_end, suspect_a_stall


def test_an_inactive_process_after_the_end_is_found(world: World) -> None:
    """After the deadline for exits; only the rank that is still there is named."""
    at_the_end(world)
    world.watch.rank_exited(0)
    assert world.advance(3.5) is None
    stall = world.stalls(4.0)
    assert stall.culprits == (1,)
    assert "training was complete" in stall.sentence


def test_a_connected_process_gets_longer_to_exit(world: World) -> None:
    """An upload may wait for its answer."""
    at_the_end(world)
    world.connected = {0}
    assert world.advance(299.0, every=0.5) is None
    assert world.advance(5.0, every=0.5) is not None


def test_a_rank_that_does_not_exit_is_awaited(world: World) -> None:
    """With the deadline of its process, which is long while it computes."""
    at_the_end(world)
    world.watch.rank_exited(0)
    assert world.advance(2.5) is None
    waited = world.watch.awaited
    assert waited is not None
    assert (waited.rank, waited.exiting, waited.busy) == (1, True, False)
    assert waited.deadline_at_seconds - world.now < TIGHT.exit_seconds
    world.advance(5.0, doing=world.computing(1, 0.1))
    waited = world.watch.awaited
    assert waited is not None
    assert waited.busy
    assert waited.deadline_at_seconds - world.now > TIGHT.ceiling_seconds - 15


def test_the_end_of_the_scripts_clears_a_suspected_stall(world: World) -> None:
    """The script has run its last line after all."""
    suspect_a_stall(world)
    at_the_end(world)
    assert world.advance(0.1) is None
    assert world.watch.suspicion is None


def test_a_process_that_works_after_the_end_is_not_reported(world: World) -> None:
    """An upload may take hours."""
    at_the_end(world)

    def work() -> None:
        world.io[1] = (world.io[1] or 0) + 64 * 1024

    assert world.advance(600.0, every=0.5, doing=work) is None


def test_a_process_whose_io_cannot_be_read_after_the_end_is_not_reported(world: World) -> None:
    """Unknown is not zero: it may be uploading."""
    at_the_end(world)
    world.io = {0: None, 1: None}
    assert world.advance(60.0, every=0.5) is None
