"""Private behavior of accelerate that grpo-run relies on; a failed test names what changed."""

from __future__ import annotations

import inspect

import accelerate.state
import pytest
from accelerate.commands import launch
from accelerate.utils import launch as prepare
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


def test_the_validation_returns_three_values() -> None:
    """Arguments, the file's defaults, and whether mixed precision came from the file."""
    source = inspect.getsource(launch._validate_launch_command)
    assert "return args, defaults, mp_from_config_flag" in source


def test_launch_selects_the_environment_as_we_do() -> None:
    """`_prepare_function` repeats these branches."""
    source = inspect.getsource(launch.launch_command)
    order = [
        "if args.use_deepspeed and not args.cpu",
        'deepspeed_fields_from_accelerate_config.append("mixed_precision")',
        "deepspeed_launcher(args)",
        "elif args.use_fsdp and not args.cpu",
        "multi_gpu_launcher(args)",
        "elif args.multi_gpu and not args.cpu",
        "simple_launcher(args)",
    ]
    places = [source.find(statement) for statement in order]
    assert -1 not in places
    assert places == sorted(places)
    for launcher, function in (
        (launch.deepspeed_launcher, "prepare_deepspeed_cmd_env(args)"),
        (launch.multi_gpu_launcher, "prepare_multi_gpu_env(args)"),
        (launch.simple_launcher, "prepare_simple_launcher_cmd_env(args)"),
    ):
        assert function in inspect.getsource(launcher)


def test_the_prepare_functions_take_one_argument() -> None:
    """The two functions that return a command return it first."""
    for function in (
        prepare.prepare_deepspeed_cmd_env,
        prepare.prepare_multi_gpu_env,
        prepare.prepare_simple_launcher_cmd_env,
    ):
        assert list(inspect.signature(function).parameters) == ["args"]
    assert "return cmd, current_env" in inspect.getsource(prepare.prepare_deepspeed_cmd_env)
    assert "return cmd, current_env" in inspect.getsource(prepare.prepare_simple_launcher_cmd_env)
    assert "return current_env" in inspect.getsource(prepare.prepare_multi_gpu_env)


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
