"""A rank that has run out of memory: it is named before everything that follows from it."""

from __future__ import annotations

import signal

import pytest
from support.builders.watchdog.failed_ranks import diagnose, make_error, make_exit
from support.builders.watchdog.slots import make_slot

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.diagnosis.exits import is_victim
from grpo_run.watchdog.memory.error_patterns import ErrorSource
from grpo_run.watchdog.memory.shortage import MemoryPhase
from grpo_run.watchdog.observation import OpenPhase, Phase, RaisedError, RankError, RankState

TORCH = ("torch.OutOfMemoryError", "builtins.RuntimeError", "builtins.Exception")
RUNTIME = ("builtins.RuntimeError", "builtins.Exception")
MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 512.00"
    " MiB is free."
)
NCCL = (
    "NCCL error in: NCCLUtils.hpp:77, unhandled cuda error, NCCL version 2.21.5\nncclUnhandledCudaError: Call"
    " to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
)
BACKWARD = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    loss.backward()\n'


def exhausted(types: tuple[str, ...] = TORCH, message: str = MESSAGE, **changes: object) -> RankError:
    """torch's allocator has failed in a backward pass."""
    fields: dict[str, object] = {
        "type": types[0].rpartition(".")[2],
        "message": message,
        "traceback": BACKWARD,
        "phases": (Phase.forward_backward,),
        "bases": types,
        "chain": (RaisedError(types=types, message=message),),
    }
    return make_error(**(fields | changes))


def test_exhausted_memory_at_the_first_step_is_no_failed_start() -> None:
    """The advice on a script that fails before its first step would be wrong."""
    slot = make_slot(1, train_call=1, step=0, resumed_step=0)
    verdict = diagnose(
        make_exit(1, error=exhausted()), slots={0: make_slot(0), 1: slot}, best_position=(0, 0)
    )
    assert (verdict.cause, verdict.culprit, verdict.confidence) == (Cause.gpu_oom, 1, "proved")
    assert verdict.sentence == (
        "Rank 1 ran out of GPU memory in step 1 (phase backward): tried to allocate 2.0 GiB with 512 MiB"
        " of 79.2 GiB free."
    )
    assert not verdict.starting
    assert not any("before its first step" in line for line in verdict.advice)
    shortage = verdict.as_json()["shortage"]
    assert (shortage["phase"], shortage["tried_bytes"], shortage["capacity_bytes"]) == (
        "backward",
        2 * 1024**3,
        round(79.15 * 1024**3),
    )


def test_exhausted_memory_while_loading_is_named_too() -> None:
    """It is a failed start all the same."""
    slot = make_slot(0, train_call=0, step=0, phases=(), state=RankState.starting)
    error = exhausted(phases=(Phase.startup,), traceback="Traceback (most recent call last):\n")
    verdict = diagnose(make_exit(0, error=error), slots={0: slot}, best_position=(0, 0))
    assert verdict.cause is Cause.gpu_oom
    assert verdict.starting
    assert verdict.sentence.startswith("Rank 0 ran out of GPU memory before the first step: ")
    assert verdict.shortage is not None
    assert verdict.shortage.phase is MemoryPhase.load


def test_nccl_without_memory_is_no_lost_connection() -> None:
    """Its class and its first line are those of a lost connection; the other ranks have lost theirs."""
    types = ("torch.distributed.DistBackendError", "torch.distributed.DistError", *RUNTIME)
    error = exhausted(types, NCCL, wall_time=1001.0)
    lost = make_error(type="RuntimeError", message="Connection closed by peer", wall_time=1000.0)
    assert not is_victim(make_exit(1, error=error))
    exits = [make_exit(0, order=0, error=lost), make_exit(1, order=1, error=error)]
    verdict = diagnose(*exits)
    assert (verdict.cause, verdict.culprit) == (Cause.gpu_oom, 1)
    assert verdict.sentence.endswith("(phase backward): NCCL: Cuda failure 2 'out of memory'.")
    assert verdict.shortage is not None
    assert verdict.shortage.source is ErrorSource.nccl


@pytest.mark.parametrize(
    ("phases", "sentence", "advice"),
    [
        ((Phase.reward,), "in step 8 (phase reward), at train.py:12: tried", "Let the reward function use"),
        (
            (Phase.data,),
            "in step 8 (phase data), in the script's own code at train.py:12: tried",
            "Let the script use",
        ),
        ((Phase.callback,), "(callback Log.on_step_end), at train.py:12: tried", "Let the callback use"),
    ],
)
def test_memory_that_no_phase_of_a_trainer_has_exhausted_is_named_with_its_line(
    phases: tuple[Phase, ...], sentence: str, advice: str
) -> None:
    """No micro-batch decides how much the script's own code needs there."""
    error = exhausted(
        phases=phases,
        callback="Log.on_step_end" if phases == (Phase.callback,) else "",
        location=("/home/u/train.py", 12, "collect"),
        traceback=(
            'Traceback (most recent call last):\n  File "/home/u/train.py", line 12, in collect\n   '
            " torch.empty(n)\n"
        ),
    )
    verdict = diagnose(make_exit(0, error=error), slots={0: make_slot(0, step=7)})
    assert sentence in verdict.sentence
    assert [line.partition(" less ")[0] for line in verdict.advice] == [advice]


def test_advice_on_host_memory_of_the_script_s_own_code_is_about_that_code() -> None:
    """The workers of a data loader, of which there may be none, have nothing to do with a callback's list."""
    error = exhausted(
        ("builtins.MemoryError", "builtins.Exception"),
        "",
        phases=(Phase.callback,),
        callback="Log.on_step_end",
        location=("/home/u/train.py", 12, "collect"),
        traceback=(
            'Traceback (most recent call last):\n  File "/home/u/train.py", line 12, in collect\n   '
            " rows.append(row)\n"
        ),
    )
    verdict = diagnose(make_exit(0, error=error), slots={0: make_slot(0, step=7)})
    assert verdict.cause is Cause.host_oom
    (advice,) = verdict.advice
    assert "code at this line" in advice


@pytest.mark.parametrize(("number", "culprit"), [(signal.SIGABRT, 1), (signal.SIGKILL, 0)])
def test_a_rank_without_memory_is_blamed_before_ranks_that_were_aborted(
    number: signal.Signals, culprit: int
) -> None:
    """NCCL's watchdog may abort the others before the exit of the first is seen; it kills none of them."""
    exits = [make_exit(0, order=0, signal=number), make_exit(1, order=1, error=exhausted())]
    assert diagnose(*exits).culprit == culprit


@pytest.mark.parametrize(
    "chain",
    [
        (
            RaisedError(types=("train.TrainingFailed", "builtins.Exception"), message="giving up"),
            RaisedError(types=TORCH, message=MESSAGE, phases=(Phase.score, Phase.generate)),
        ),
        (RaisedError(types=TORCH, message=MESSAGE, phases=(Phase.score, Phase.generate)),),
    ],
)
def test_exhausted_memory_is_found_behind_the_exception_that_ends_the_rank(
    chain: tuple[RaisedError, ...],
) -> None:
    """A script raises another exception from it, or a context manager fails on the way; the phase is that of
    the first.
    """
    error = make_error(type="TrainingFailed", message="giving up", chain=chain, phases=(Phase.callback,))
    verdict = diagnose(make_exit(0, error=error))
    assert verdict.cause is Cause.gpu_oom
    assert verdict.shortage is not None
    assert verdict.shortage.phase is MemoryPhase.generate


@pytest.mark.parametrize(
    ("types", "message"),
    [
        (("builtins.ValueError", "builtins.Exception"), f"bad answer: {MESSAGE}"),
        (("builtins.ValueError", "builtins.Exception"), MESSAGE),
        (RUNTIME, "the judge ran out of memory"),
    ],
)
def test_an_exception_that_quotes_such_a_message_is_one_of_its_own(
    types: tuple[str, ...], message: str
) -> None:
    """A reward may quote what a server has answered."""
    verdict = diagnose(make_exit(0, error=exhausted(types, message)))
    assert (verdict.cause, verdict.shortage) == (Cause.exception, None)


def test_a_bare_kill_is_no_exhausted_memory() -> None:
    """Only counters of the kernel show that it was."""
    assert diagnose(make_exit(0, signal=signal.SIGKILL)).cause is Cause.signal


def test_the_same_memory_in_the_same_phase_and_step_is_the_same_failure() -> None:
    """Whichever rank and line asked for it; another phase or step is another failure."""

    def signature(rank: int = 0, step: int = 7, **changes: object) -> str:
        exits = [make_exit(rank, error=exhausted(**changes))]
        return diagnose(*exits, slots={rank: make_slot(rank, step=step)}).signature

    assert signature() == signature(1, location=("other.py", 1, "f")) == "gpu_oom:backward:step7"
    assert len({signature(), signature(step=8), signature(phases=(Phase.generate,))}) == 3


@pytest.mark.parametrize(
    ("types", "message", "cause", "advice"),
    [
        (("builtins.MemoryError", "builtins.Exception"), "", Cause.host_oom, "dataloader_num_workers"),
        (
            RUNTIME,
            "unable to write to file </torch_1_2>: No space left on device (28)",
            Cause.shm_full,
            "/dev/shm",
        ),
        (
            ("builtins.ValueError",),
            "No available memory for the cache blocks.",
            Cause.gpu_oom,
            "Raise vllm_gpu",
        ),
        (
            TORCH,
            f"{MESSAGE} and 5.25 GiB is reserved by PyTorch but unallocated.",
            Cause.gpu_oom,
            "expandable_segments",
        ),
        (TORCH, MESSAGE, Cause.gpu_oom, "per_device_train_batch_size"),
    ],
)
def test_advice_fits_the_memory_that_is_exhausted(
    types: tuple[str, ...], message: str, cause: Cause, advice: str
) -> None:
    """Memory of the host, /dev/shm, a KV cache, and a fragmented or full GPU."""
    verdict = diagnose(make_exit(0, error=exhausted(types, message)))
    assert verdict.cause is cause
    assert any(advice in line for line in verdict.advice)


def test_advice_on_an_evaluation_names_the_size_that_no_plan_changes() -> None:
    """A halved micro-batch of training does not help it."""
    slot = make_slot(0, phases=(OpenPhase(phase=Phase.eval, since_seconds=9.0),))
    verdict = diagnose(make_exit(0, error=exhausted(phases=None, traceback="")), slots={0: slot})
    assert any("per_device_eval_batch_size" in line for line in verdict.advice)


def test_the_phase_of_the_board_is_used_for_an_exception_that_has_left_none() -> None:
    """An exception in a step leaves no phase of its own."""
    slot = make_slot(0, phases=(OpenPhase(phase=Phase.optimizer, since_seconds=9.0),))
    error = exhausted(phases=None, traceback="")
    assert "(phase optimizer)" in diagnose(make_exit(0, error=error), slots={0: slot}).sentence


@pytest.mark.parametrize(
    ("free", "cause"), [(0, Cause.shm_full), (1024**2, Cause.signal), (None, Cause.signal)]
)
def test_a_bus_error_is_a_full_shared_memory_if_it_is_full(free: int | None, cause: Cause) -> None:
    """A truncated file that is mapped causes the same signal."""
    exits = [make_exit(1, signal=signal.SIGBUS)]
    verdict = diagnose(*exits, shared_memory_free_bytes=free)
    assert (verdict.cause, verdict.culprit) == (cause, 1)
    assert any("/dev/shm" in line for line in verdict.advice)
    if cause is Cause.shm_full:
        assert verdict.sentence == (
            "Rank 1 ran out of shared memory (/dev/shm) in step 8 (phase generate):"
            " it was killed by SIGBUS, and /dev/shm has 0 bytes left."
        )


def test_other_signals_are_no_full_shared_memory() -> None:
    """However little space there is."""
    exits = [make_exit(1, signal=signal.SIGSEGV)]
    assert diagnose(*exits, shared_memory_free_bytes=0).cause is Cause.signal


def test_an_aborted_rank_without_memory_is_blamed_before_another_that_was_aborted() -> None:
    """The C++ runtime has aborted it, and NCCL's watchdog the other."""
    exits = [
        make_exit(0, order=0, signal=signal.SIGABRT),
        make_exit(1, order=1, signal=signal.SIGABRT, error=exhausted(phases=None, traceback="")),
    ]
    verdict = diagnose(*exits)
    assert (verdict.cause, verdict.culprit, verdict.deterministic) == (Cause.gpu_oom, 1, False)
