"""Every private name of Python and torch that the runtime uses still exists."""

from __future__ import annotations

import inspect
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.process
import multiprocessing.util
import sys
import time

import pytest
import torch
from torch.distributed import AllreduceOptions, HashStore, ProcessGroupGloo, ReduceOp
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from grpo_run.runtime.processes.agent import Agent
from grpo_run.runtime.upstream import process_names


def test_the_agent_of_torch_has_what_ours_overrides_calls_and_reads() -> None:
    """Overrides have torch's parameters, in the same order, because torch passes them by position."""
    ours = {name for name, value in vars(Agent).items() if inspect.isfunction(value) and name != "__init__"}
    assert {name for name in ours if hasattr(LocalElasticAgent, name)} <= set(process_names.AGENT_METHODS)
    for name in process_names.AGENT_METHODS:
        theirs = list(inspect.signature(getattr(LocalElasticAgent, name)).parameters)
        assert name not in ours or list(inspect.signature(getattr(Agent, name)).parameters) == theirs, name
    for name in process_names.AGENT_ATTRIBUTES:
        assert f"self.{name} = " in inspect.getsource(SimpleElasticAgent.__init__)


@pytest.mark.parametrize("name", process_names.FORKSERVER_ATTRIBUTES)
def test_the_forkserver_has_the_attribute(name: str) -> None:
    """Both the instance of the module and a new one."""
    server = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    assert hasattr(server, name)
    assert hasattr(type(server)(), name)


@pytest.mark.parametrize("name", ["_current_process", "_parent_process"])
def test_multiprocessing_has_the_variable(name: str) -> None:
    """The module reads it; otherwise an assignment would change nothing."""
    assert hasattr(multiprocessing.process, name)
    assert name in inspect.getsource(
        multiprocessing.process.BaseProcess._bootstrap
    ) or name in inspect.getsource(getattr(multiprocessing.process, name.removeprefix("_")))


def test_the_main_process_class_can_be_instantiated() -> None:
    """It has no public name and takes no arguments."""
    made = process_names._MAIN_PROCESS()
    assert made.name == "MainProcess"
    assert made._config["daemon"] is False if "daemon" in made._config else not made.daemon


def test_the_temporary_folder_is_the_one_that_multiprocessing_has_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(multiprocessing.process.current_process()._config, "tempdir", raising=False)
    assert process_names.temporary_folder() is None
    made = multiprocessing.util.get_temp_dir()
    assert process_names.temporary_folder() == made


def test_hiding_main_hides_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiprocessing finds the script by these two attributes. Both are restored, also after an error."""
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", "/bin/grpo-run", raising=False)
    monkeypatch.setattr(main, "__spec__", None, raising=False)

    def fails() -> None:
        with process_names.hidden_main():
            assert main.__file__ is None
            raise OSError("no more processes")

    with pytest.raises(OSError, match="no more"):
        fails()
    assert main.__file__ == "/bin/grpo-run"


def test_hiding_main_adds_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `python -c` there is none; libraries check with `hasattr`."""
    main = sys.modules["__main__"]
    monkeypatch.delattr(main, "__file__", raising=False)
    with process_names.hidden_main():
        pass
    assert not hasattr(main, "__file__")


def test_without_a_forkserver_there_is_no_pid() -> None:
    """None is running here."""
    assert process_names.forkserver_pid() is None


def test_a_fresh_process_has_not_inherited_cuda() -> None:
    """The name in torch exists."""
    assert process_names.cuda_was_opened_before_fork() is False


@pytest.mark.parametrize(
    ("function", "module", "name"),
    [("wait_for_threads", "threading", "_shutdown"), ("run_exit_handlers", "atexit", "_run_exitfuncs")],
)
def test_the_exit_steps_of_the_interpreter_exist(
    monkeypatch: pytest.MonkeyPatch, function: str, module: str, name: str
) -> None:
    """They are called without arguments; replaced here, because this process continues."""
    called: list[int] = []
    monkeypatch.setattr(f"{module}.{name}", lambda: called.append(1))
    getattr(process_names, function)()
    assert called == [1]


def test_a_named_group_reduces() -> None:
    """No default group is needed; its collectives count from 1."""
    # otherwise the assignment would leave a group without a name
    assert all(hasattr(ProcessGroupGloo._Options(), name) for name in process_names.GLOO_OPTIONS)
    group = process_names.named_gloo_group(HashStore(), 0, 1, name="grpo_run/vote", timeout_seconds=30.0)
    assert group.options.group_name == "grpo_run/vote"
    assert group.options.global_ranks_in_group == [0]
    assert group.options._timeout.total_seconds() == 30.0
    tensor = torch.tensor([3, -3], dtype=torch.int64)
    options = AllreduceOptions()
    options.reduceOp = ReduceOp(ReduceOp.MAX)
    group.allreduce([tensor], options).wait()
    assert tensor.tolist() == [3, -3]
    assert group._get_sequence_number_for_group() == 1


def test_a_forgotten_child_is_not_waited_for() -> None:
    """It is not in the list of children that Python waits for at exit."""
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,), daemon=True)
    process.start()
    try:
        assert process in multiprocessing.active_children()
        process_names.forget_child(process)
        assert process not in multiprocessing.active_children()
        process_names.forget_child(process)  # once more is no error
    finally:
        process.kill()
        process.join(10)
