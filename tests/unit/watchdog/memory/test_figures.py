"""The figures of messages: torch's, NCCL's, vLLM's and the host's."""

from __future__ import annotations

from dataclasses import asdict

from grpo_run.watchdog.memory.shortage import Figures, described_in, read_figures, usage_in

MIB, GIB = 1024**2, 1024**3


def test_the_figures_of_torch_are_read() -> None:
    """Also with memory in private pools."""
    message = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which"
        " 512.00 MiB is free. Process 123 has 1.00 GiB memory in use. Including non-PyTorch memory, this"
        " process has 78.65 GiB memory in use. Of the allocated memory 71.50 GiB is allocated by PyTorch,"
        " with 100.00 MiB allocated in private pools (e.g., CUDA Graphs), and 5.25 GiB is reserved by PyTorch"
        " but unallocated. If reserved but unallocated memory is large try"
    )
    found = read_figures(message)
    assert found == Figures(
        tried_bytes=2 * GIB,
        free_bytes=512 * MIB,
        capacity_bytes=round(79.15 * GIB),
        in_use_bytes=round(78.65 * GIB),
        allocated_bytes=round(71.5 * GIB),
        unallocated_bytes=round(5.25 * GIB),
    )
    assert found.request == "tried to allocate 2.0 GiB with 512 MiB of 79.2 GiB free"
    assert found.usage == (
        "71.5 GiB allocated by tensors, 5.2 GiB reserved and not allocated, 78.7 GiB in use by the process"
    )
    assert Figures.from_json(asdict(found)) == found


def test_the_figures_of_other_messages_are_read() -> None:
    """NCCL says what it tried, vLLM what is free, numpy and torch on the CPU what they tried."""
    assert read_figures("Last error:\nFailed to CUDA calloc async 608 bytes").tried_bytes == 608
    engine = read_figures("Free memory on device cuda:0 (20.5/80.0 GiB) on startup is less than desired")
    assert (engine.free_bytes, engine.capacity_bytes) == (round(20.5 * GIB), 80 * GIB)
    assert read_figures("you tried to allocate 4503599627370496 bytes.").tried_bytes == 4503599627370496
    assert read_figures("Unable to allocate 7.50 GiB for an array").tried_bytes == round(7.5 * GIB)
    assert read_figures("CUDA error: out of memory") == Figures()
    assert Figures().request == Figures().usage == ""
    assert Figures.from_json({"tried_bytes": "2", "free_bytes": 3}) == Figures(free_bytes=3)


def test_a_verdict_is_described_as_far_as_its_figures_are_known() -> None:
    """The report shows all of it in one row, the terminal what was in use."""
    known = asdict(Figures(tried_bytes=2 * GIB, free_bytes=GIB, allocated_bytes=70 * GIB))
    shortage = {"memory": "GPU memory", "phase": "backward", "source": "allocator"}
    verdict = {"shortage": shortage | known}
    assert described_in(verdict) == (
        "GPU memory, phase backward, reported by allocator; tried to allocate 2.0 GiB with 1.0 GiB free;"
        " 70.0 GiB allocated by tensors"
    )
    assert usage_in(verdict) == "70.0 GiB allocated by tensors"
    assert described_in({"shortage": shortage}) == "GPU memory, phase backward, reported by allocator"
    assert described_in({"shortage": None}) == usage_in({"shortage": None}) == described_in({}) == ""
