"""Private names of torch: process groups, autograd, the data loader and the CPUs near a GPU.

`runtime/rank/collective_recorder.py` and `runtime/rank/worker_server.py` use them to record collectives,
`runtime/rank/loops/data_position.py` to continue within an epoch. The contract tests report what a new
release has changed.
"""

from __future__ import annotations

import json
import operator
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

COLLECTIVE_METHODS = (
    "allreduce", "allreduce_coalesced", "allgather", "_allgather_base", "all_gather_single",
    "all_gather_single_coalesced", "allgather_coalesced", "allgather_into_tensor_coalesced", "alltoall",
    "alltoall_base", "all_to_all_single", "barrier", "broadcast", "gather", "reduce", "reduce_scatter",
    "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced", "scatter",
)  # fmt: skip
"""ProcessGroup methods that issue one collective and advance the group's sequence number.

A method that the installed release does not have is not wrapped.
"""
_ONE_TENSOR = {"allreduce", "allreduce_coalesced", "barrier", "broadcast", "reduce"}
OUTPUT_FIRST = frozenset(COLLECTIVE_METHODS) - _ONE_TENSOR
"""Collective methods whose first two arguments are (outputs, inputs)."""
UNRECORDED_METHODS = ("send", "recv", "recv_anysource", "monitored_barrier")
"""ProcessGroup methods that the Flight Recorder does not record."""
GROUP_SEQUENCE = "_get_sequence_number_for_group"
"""ProcessGroup and backend method: return the number of collectives issued on the group."""
WORKER_SERVER = "_WorkerServer"
"""Torch's HTTP server on a unix socket. It answers from C++ threads."""
REGISTER_HANDLER = "_register_handler"
"""Torch's function (name, handler): let the worker server call a Python function (request, response)."""
RUN_BACKWARD = "_engine_run_backward"
"""Function of `torch.autograd.graph` that calls autograd's engine."""
sequence_number = operator.methodcaller(GROUP_SEQUENCE)  # half the time of `getattr` and a call
"""Function (group): return how many collectives this rank has issued on a process group or backend."""
CALLS_FILE = "torch/distributed/distributed_c10d.py"
"""File of the functions that scripts call; it issues collectives."""
CALLS_WITH_LIMIT = frozenset({"barrier"})
"""Collective methods to which `CALLS_FILE` passes a time limit. Scripts that call the methods themselves may
set others.
"""


def uncounted_numbers(method: str, group_rank: int, group_size: int) -> int:
    """Return by how many more a call advances a Gloo group's sequence number than the Flight Recorder's.

    Each send and receive advances the group's alone. A monitored barrier advances the recorder's by two, and
    is made of two sends or receives between the group's first rank and each other one.

    Args:
        method: one of `UNRECORDED_METHODS`.
        group_rank: this rank's number in the group.
    """
    if method != "monitored_barrier":
        return 1
    return 2 * (group_size - 1) - 2 if group_rank == 0 else 0


@contextmanager
def replaced_batch_sampler(loader: Any, sampler: Any) -> Iterator[None]:
    """Let the iterators that a `DataLoader` makes within the block use another batch sampler.

    `DataLoader` keeps it in an attribute that it refuses to set again, and reads it when it makes an
    iterator.
    """
    own = vars(loader)["batch_sampler"]
    vars(loader)["batch_sampler"] = sampler
    try:
        yield
    finally:
        vars(loader)["batch_sampler"] = own


def distributed_c10d() -> Any:
    """Return the module of process groups in C++."""
    from torch._C import _distributed_c10d

    return _distributed_c10d


def print_numa_cpus() -> None:
    """Print the CPUs that torchrun binds each local rank to, as JSON. Opens the GPUs.

    `sys.argv[1:]`: the mode, as `--numa-binding` has it, and the number of local ranks.

    Raises:
        Exception: of torch, if it cannot tell them.
    """
    from torch.numa import binding

    mode, ranks = sys.argv[1:]
    options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
    choose = binding._get_validated_logical_cpus_to_bind_to
    print(json.dumps([sorted(choose(gpu_index=rank, numa_options=options)) for rank in range(int(ranks))]))


def import_dynamo() -> None:
    """Import torch's compiler, which torch imports by itself at an optimizer's first step."""
    import torch._dynamo  # noqa: F401
