"""Private behavior of accelerate that grpo-run relies on; a failed test names what changed.

That the environment is accelerate's is tested in `integration/test_parallel_modes_plain.py`, and that private
functions have their parameters in `test_releases.py`.
"""

from __future__ import annotations

import inspect

import accelerate.state
import pytest
from accelerate.commands import launch
from shims import fsdp_on_cpu

from grpo_run.runtime.upstream.accelerate_launch import LAUNCHER_KEYS, PREFIXES


def test_the_parser_accepts_our_arguments() -> None:
    """`nondefault` decides whether the sections of the file are read."""
    arguments = launch.launch_command_parser().parse_args(
        ["--config_file", "x", "--num_processes", "2", "s.py"]
    )
    assert arguments.nondefault >= {"config_file", "num_processes"}
    assert {"use_deepspeed", "use_fsdp", "multi_gpu", "main_process_port", "num_machines"} <= set(
        vars(arguments)
    )
    assert set(vars(arguments)) >= LAUNCHER_KEYS - {"deepspeed_hostfile"}


def test_the_sections_are_merged_with_the_same_prefixes() -> None:
    """With another prefix, the keys of a section would be looked up under the wrong names."""
    source = inspect.getsource(launch._validate_launch_command)
    for section, prefix in PREFIXES.items():
        assert f'name == "{section}" and not key.startswith("{prefix}' in source


def test_accelerate_replaces_fsdp_by_ddp_on_cpu() -> None:
    """FSDP without an accelerator is refused for this reason; remove the rule if this test fails."""
    source = inspect.getsource(accelerate.state.AcceleratorState.__init__)
    before = source[: source.index("self.distributed_type = DistributedType.FSDP")]
    condition = before[before.rindex("elif self.distributed_type in [") :]
    assert "MULTI_GPU" in condition
    assert "MULTI_CPU" not in condition


def test_the_fsdp_shim_fits_accelerate() -> None:
    """The shim repeats assignments of `AcceleratorState.__init__`; `check` names a missing one."""
    fsdp_on_cpu.check()


def test_the_fsdp_shim_refuses_another_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent DDP run would otherwise be taken for a test of FSDP."""
    monkeypatch.setattr(accelerate.state.AcceleratorState, "__init__", lambda self, cpu=False: None)
    with pytest.raises(fsdp_on_cpu.ShimOutdated, match="fsdp_plugin"):
        fsdp_on_cpu.install()
