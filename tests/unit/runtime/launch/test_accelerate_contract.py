"""What grpo-run relies on in accelerate and accelerate does not promise: each test names what changed."""

from __future__ import annotations

import inspect

import accelerate.state
import pytest
from accelerate.commands import launch
from accelerate.utils import DistributedType
from accelerate.utils import launch as prepare
from shims import fsdp_on_cpu

from grpo_run.runtime.launch.accelerate_environment import LAUNCHER_KEYS, SECTIONS, replaced_in_fsdp2
from grpo_run.runtime.launch.accelerate_file import KNOWN


def test_the_parser_still_takes_what_we_give_it() -> None:
    """`nondefault` decides whether the file's sections are read at all."""
    arguments = launch.launch_command_parser().parse_args(
        ["--config_file", "x", "--num_processes", "2", "s.py"]
    )
    assert arguments.nondefault >= {"config_file", "num_processes"}
    assert {"use_deepspeed", "use_fsdp", "multi_gpu", "main_process_port", "num_machines"} <= set(
        vars(arguments)
    )
    assert set(vars(arguments)) >= LAUNCHER_KEYS - {"deepspeed_hostfile"}


def test_the_validation_still_returns_three_values() -> None:
    """Arguments, the file's defaults, and whether mixed precision came from the file."""
    source = inspect.getsource(launch._validate_launch_command)
    assert "return args, defaults, mp_from_config_flag" in source


def test_launch_still_chooses_the_environment_as_we_do() -> None:
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


def test_the_prepare_functions_take_the_arguments_alone() -> None:
    """And the two that return a command return it first."""
    for function in (
        prepare.prepare_deepspeed_cmd_env,
        prepare.prepare_multi_gpu_env,
        prepare.prepare_simple_launcher_cmd_env,
    ):
        assert list(inspect.signature(function).parameters) == ["args"]
    assert "return cmd, current_env" in inspect.getsource(prepare.prepare_deepspeed_cmd_env)
    assert "return cmd, current_env" in inspect.getsource(prepare.prepare_simple_launcher_cmd_env)
    assert "return current_env" in inspect.getsource(prepare.prepare_multi_gpu_env)


def test_the_sections_are_still_merged_with_the_same_prefixes() -> None:
    """A section that gets a new prefix would be asked for under the wrong name."""
    source = inspect.getsource(launch._validate_launch_command)
    for section, prefix in SECTIONS.items():
        if prefix:
            assert f'name == "{section}" and not key.startswith("{prefix.rstrip("_")}' in source


def test_every_type_accelerate_knows_is_known_here() -> None:
    """A new one would be called misspelt."""
    assert {kind.value for kind in DistributedType} == set(KNOWN)


def test_accelerate_still_turns_fsdp_into_ddp_on_cpu() -> None:
    """The reason to refuse FSDP without an accelerator; drop the rule when this fails."""
    source = inspect.getsource(accelerate.state.AcceleratorState.__init__)
    before = source[: source.index("self.distributed_type = DistributedType.FSDP")]
    condition = before[before.rindex("elif self.distributed_type in [") :]
    assert "MULTI_GPU" in condition
    assert "MULTI_CPU" not in condition


def test_deepspeed_is_still_ignored_where_the_cpu_is_asked_for_by_variable() -> None:
    """The reason why ACCELERATE_USE_CPU is refused with DEEPSPEED."""
    source = inspect.getsource(accelerate.state.AcceleratorState.__init__)
    assert 'os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true" and not cpu' in source


def test_fsdp_1_still_takes_the_sharding_strategy_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason to refuse `fsdp_reshard_after_forward` that differs from it."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    monkeypatch.setenv("FSDP_VERSION", "1")
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "FULL_SHARD")
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "SHARD_GRAD_OP")
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.sharding_strategy.name == "FULL_SHARD"
    assert plugin.reshard_after_forward is None


def test_the_converter_still_says_what_fsdp_2_does_not_read() -> None:
    """The keys that accelerate's own `to-fsdp2` drops or renames."""
    assert set(replaced_in_fsdp2()) == {
        "fsdp_backward_prefetch",
        "fsdp_forward_prefetch",
        "fsdp_sharding_strategy",
        "fsdp_sync_module_states",
        "fsdp_use_orig_params",
    }


def test_the_shim_that_shards_on_cpu_still_fits_accelerate() -> None:
    """It repeats assignments of `AcceleratorState.__init__`; `check` names the one that is gone."""
    fsdp_on_cpu.check()


def test_the_shim_refuses_an_accelerate_it_was_not_written_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a silent DDP run that believes it tests FSDP."""
    monkeypatch.setattr(accelerate.state.AcceleratorState, "__init__", lambda self, cpu=False: None)
    with pytest.raises(fsdp_on_cpu.ShimOutdated, match="fsdp_plugin"):
        fsdp_on_cpu.install()
