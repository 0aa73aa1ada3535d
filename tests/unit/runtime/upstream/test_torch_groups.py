"""What recording collectives relies on in torch."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

from grpo_run.runtime.upstream import torch_names


@pytest.mark.parametrize("name", [*torch_names.COLLECTIVE_METHODS, torch_names.GROUP_SEQUENCE, "group_name"])
def test_the_process_group_has_the_method(name: str) -> None:
    """A missing method would not be wrapped, and its collectives would have no source line."""
    assert hasattr(_distributed_c10d.ProcessGroup, name)


def test_every_collective_method_is_listed() -> None:
    """A method that is not listed would not be logged.

    `monitored_barrier` consists of point-to-point sends.
    """
    words = ("reduce", "gather", "scatter", "broadcast", "alltoall", "all_to_all", "barrier")
    found = {
        name
        for name in dir(_distributed_c10d.ProcessGroup)
        if not name.startswith("__") and any(word in name for word in words)
    }
    assert found - {"monitored_barrier"} == set(torch_names.COLLECTIVE_METHODS)


def test_methods_with_outputs_first_are_listed() -> None:
    """All other methods change their tensors in place."""
    assert set(torch_names.COLLECTIVE_METHODS) > torch_names.OUTPUT_FIRST
    in_place = {name for name in torch_names.COLLECTIVE_METHODS if name not in torch_names.OUTPUT_FIRST}
    assert in_place == {"allreduce", "allreduce_coalesced", "barrier", "broadcast", "reduce"}


@pytest.mark.parametrize("name", ["wait", "is_completed"])
def test_work_has_the_method(name: str) -> None:
    """It is wrapped to see which thread waits."""
    assert callable(getattr(_distributed_c10d.Work, name))


def test_torch_has_a_worker_server() -> None:
    """It takes a path and can be shut down."""
    server = getattr(_distributed_c10d, torch_names.WORKER_SERVER)
    assert callable(server.shutdown)
    assert "host_or_file: str" in (server.__init__.__doc__ or "")


def test_torch_passes_time_limits_to_no_other_collective() -> None:
    """The limits of collectives that torch's own functions issue are read for these methods only."""
    assert distributed_c10d.__file__.endswith(torch_names.CALLS_FILE)
    tree = ast.parse(Path(distributed_c10d.__file__).read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    limited = {
        function.name
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "opts.timeout"
    }
    assert limited <= torch_names.CALLS_WITH_LIMIT
