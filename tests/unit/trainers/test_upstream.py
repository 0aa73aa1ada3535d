"""Every private name of the libraries that `trainers` uses still exists, and versions are checked."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import pickle
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest
import safetensors.torch
import torch
from packaging.specifiers import SpecifierSet
from torch._C import _distributed_c10d
from torch.serialization import get_crc32_options
from torch.utils.serialization import config

from grpo_run.runtime.errors import UntestedVersionError
from grpo_run.trainers import upstream


@functools.cache
def methods(package: str, file: str, name: str) -> dict[str, ast.FunctionDef]:
    """Return the methods that a class defines itself, parsed from the source: an import would take seconds."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / file).read_text(encoding="utf-8"))
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}


def parameters(function: ast.FunctionDef) -> list[str]:
    """Return the names of the positional parameters."""
    return [argument.arg for argument in function.args.args]


@pytest.mark.parametrize("name", [*upstream.TRAINER_METHODS, "train", "evaluate", "training_step"])
def test_the_trainer_has_the_method(name: str) -> None:
    """The guard wraps or replaces it."""
    assert name in methods("transformers", "trainer.py", "Trainer")


def test_what_scripts_that_train_by_themselves_call_is_public() -> None:
    """An optimizer step runs a hook, and accelerate saves a state and returns its directory."""
    assert "register_optimizer_step_pre_hook" in sys.modules["torch.optim.optimizer"].__all__
    assert callable(torch.compiler.is_compiling)
    save = methods("accelerate", "accelerator.py", "Accelerator")["save_state"]
    assert parameters(save)[:2] == ["self", "output_dir"]
    assert any(isinstance(node, ast.Return) and node.value is not None for node in ast.walk(save))


def test_the_checkpoint_method_takes_model_and_trial() -> None:
    """The guard calls it to save the last step."""
    save = methods("transformers", "trainer.py", "Trainer")[upstream.SAVE_CHECKPOINT]
    assert parameters(save) == ["self", "model", "trial"]


def test_train_takes_checkpoint_and_trial_by_position() -> None:
    """The guard passes both on."""
    train = methods("transformers", "trainer.py", "Trainer")["train"]
    assert parameters(train)[:3] == ["self", "resume_from_checkpoint", "trial"]


def test_rotation_takes_the_limit_and_the_best_checkpoint() -> None:
    """The guard defers rotation until the new checkpoint is published."""
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / "trainer_utils.py").read_text(encoding="utf-8"))
    (rotate,) = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "rotate_checkpoints"
    ]
    assert {"output_dir", "save_total_limit", "best_model_checkpoint", "use_mtime"} <= set(parameters(rotate))


@pytest.mark.parametrize(("file", "name"), [("grpo_trainer", "GRPOTrainer"), ("rloo_trainer", "RLOOTrainer")])
@pytest.mark.parametrize("method", upstream.ROLLOUT_METHODS)
def test_trl_trainers_have_the_method(file: str, name: str, method: str) -> None:
    """The guard marks it as generation, scoring or reward."""
    assert method in methods("trl", f"trainer/{file}.py", name)


def test_the_installed_versions_are_tested() -> None:
    """The test environment itself is inside the ranges."""
    assert upstream.check_versions(allow_untested=False) == []


def test_each_checked_library_has_a_bounded_range() -> None:
    """The ranges come from the project's requirements.

    A missing upper bound would admit untested releases.
    """
    tested = upstream.tested_versions()
    assert tuple(tested) == upstream.CHECKED_LIBRARIES
    for range_ in tested.values():
        assert {one.operator for one in range_} == {">=", "<"}


@pytest.mark.parametrize("range_", [">=1,<2", "<0.1"])
def test_a_version_outside_the_range_is_rejected(range_: str) -> None:
    """The error names the installed version, the tested range and the option that allows it."""
    with pytest.raises(UntestedVersionError, match=f"pytest {version('pytest')}.*--allow-untested"):
        upstream.check_versions(allow_untested=False, tested={"pytest": SpecifierSet(range_)})


def test_an_allowed_version_outside_the_range_is_reported() -> None:
    """One sentence per library."""
    (sentence,) = upstream.check_versions(allow_untested=True, tested={"pytest": SpecifierSet("<0.1")})
    assert sentence == f"pytest {version('pytest')} is outside the tested range <0.1"


def test_a_missing_library_is_always_rejected() -> None:
    """Allowing untested versions does not help."""
    with pytest.raises(UntestedVersionError, match="not installed; install no-such-library"):
        upstream.check_versions(allow_untested=True, tested={"no-such-library": SpecifierSet(">=1")})


@pytest.mark.parametrize(
    ("found", "inside"),
    [("2.13.0+cpu", True), ("2.13.1+cu130", True), ("2.13.0", True), ("2.14.0", False), ("2.12.9", False)],
)
def test_a_local_version_label_is_ignored(monkeypatch: pytest.MonkeyPatch, found: str, inside: bool) -> None:
    """Torch's wheels name the accelerator in their version."""
    monkeypatch.setattr(upstream, "version", lambda name: found)
    outside = upstream.check_versions(
        allow_untested=True, tested={"torch": upstream.tested_versions()["torch"]}
    )
    assert (outside == []) is inside


def test_the_check_reads_metadata_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library without metadata is missing, even if it could be imported."""

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(upstream, "version", missing)
    with pytest.raises(UntestedVersionError, match="not installed"):
        upstream.check_versions(allow_untested=False)


@pytest.mark.parametrize("name", [*upstream.COLLECTIVE_METHODS, upstream.GROUP_SEQUENCE, "group_name"])
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
    assert found - {"monitored_barrier"} == set(upstream.COLLECTIVE_METHODS)


def test_methods_with_outputs_first_are_listed() -> None:
    """All other methods change their tensors in place."""
    assert set(upstream.COLLECTIVE_METHODS) > upstream.OUTPUT_FIRST
    in_place = {name for name in upstream.COLLECTIVE_METHODS if name not in upstream.OUTPUT_FIRST}
    assert in_place == {"allreduce", "allreduce_coalesced", "barrier", "broadcast", "reduce"}


@pytest.mark.parametrize("name", ["wait", "is_completed"])
def test_work_has_the_method(name: str) -> None:
    """It is wrapped to see which thread waits."""
    assert callable(getattr(_distributed_c10d.Work, name))


def test_torch_has_a_worker_server() -> None:
    """It takes a path and can be shut down."""
    server = getattr(_distributed_c10d, upstream.WORKER_SERVER)
    assert callable(server.shutdown)
    assert "host_or_file: str" in (server.__init__.__doc__ or "")


# ---- functions that write tensors to files ----


def test_torch_save_has_the_expected_parameters() -> None:
    """Names, order and defaults; `_save` is called by position."""
    save = inspect.signature(torch.save).parameters
    assert list(save) == [
        "obj",
        "f",
        "pickle_module",
        "pickle_protocol",
        "_use_new_zipfile_serialization",
        "_disable_byteorder_record",
    ]
    assert save["pickle_module"].default is pickle
    assert save["_use_new_zipfile_serialization"].default is True
    inner = inspect.signature(torch.serialization._save)  # type: ignore[no-untyped-call, unused-ignore]
    assert list(inner.parameters) == [
        "obj",
        "zip_file",
        "pickle_module",
        "pickle_protocol",
        "_disable_byteorder_record",
    ]


def test_torch_save_is_looked_up_where_it_is_replaced() -> None:
    """Both names refer to the same function."""
    assert [getattr(sys.modules[module], name) for module, name in upstream.TORCH_SAVE] == [torch.save] * 2


def test_archive_records_match_what_torch_save_writes(tmp_path: Path) -> None:
    """Names, order and sizes are equal; torch's writer appends two records of its own."""
    obj = {"weight": torch.arange(10.0), "empty": torch.empty(0), "text": "x"}
    torch.save(obj, tmp_path / "x.pt")
    listed = upstream.archive_records(obj, pickle, 2, False)
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        written = [(entry.filename, entry.file_size) for entry in archive.infolist()]
    sizes = [content if isinstance(content, int) else len(content) for _, content in listed]
    names = [f"x/{name}" for name, _ in listed]
    assert written[:-2] == list(zip(names, sizes, strict=True))
    assert [name for name, _ in written[-2:]] == ["x/version", "x/.data/serialization_id"]


def test_archive_settings_are_those_of_torch_save() -> None:
    """Changes that the script makes are included."""
    assert upstream.archive_settings() == (get_crc32_options(), torch.serialization._get_storage_alignment())
    with config.patch({"save.compute_crc32": False, "save.storage_alignment": 4096}):
        assert upstream.archive_settings() == (False, 4096)


def test_skip_data_is_detected() -> None:
    """It is set inside torch's context manager only."""
    assert not upstream.skips_data()
    with torch.serialization.skip_data():
        assert upstream.skips_data()


def test_safetensors_checks_run() -> None:
    """They raise the errors that safetensors raises before writing."""
    upstream.check_safetensors({"weight": torch.ones(2)})
    for tensors in ([torch.ones(1)], {"weight": "text"}, {"weight": torch.eye(2).to_sparse()}):
        with pytest.raises(ValueError, match=r"Expected a dict|is invalid|sparse"):
            upstream.check_safetensors(tensors)


def test_safetensors_save_file_has_the_expected_parameters() -> None:
    """They are read by name."""
    assert list(inspect.signature(safetensors.torch.save_file).parameters) == [
        "tensors",
        "filename",
        "metadata",
    ]


def test_safetensors_types_match_a_written_file() -> None:
    """Names and order of a file with one tensor of each type."""
    tensors = {name: torch.empty(1, dtype=getattr(torch, name)) for name in upstream.SAFETENSORS_TYPES}
    content = safetensors.torch.save(tensors)
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert [(name, entry["dtype"]) for name, entry in header.items()] == list(
        upstream.SAFETENSORS_TYPES.items()
    )


@pytest.mark.parametrize(
    ("package", "file", "name"),
    [
        ("transformers", "modeling_utils.py", "safe_save_file"),
        ("transformers", "integrations/accelerate.py", "save_file"),
        ("accelerate", "utils/other.py", "safe_save_file"),
    ],
)
def test_the_library_imports_save_file_under_this_name(package: str, file: str, name: str) -> None:
    """The function is replaced under this name."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / file).read_text(encoding="utf-8"))
    kept = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "safetensors.torch"
        for alias in node.names
        if alias.name == "save_file"
    }
    assert kept == {name}
    module = ".".join([package, *file.removesuffix(".py").split("/")])
    assert (module, name) in upstream.SAFETENSORS_SAVE


@pytest.mark.parametrize("name", [upstream.LOAD_RNG, upstream.FINALIZE])
def test_the_trainer_has_the_methods_of_the_exact_state(name: str) -> None:
    """One is called, the other is wrapped to add up the training time of all attempts."""
    expected = {upstream.LOAD_RNG: "checkpoint", upstream.FINALIZE: "start_time"}[name]
    assert parameters(methods("transformers", "trainer.py", "Trainer")[name])[-1] == expected


def assigned(function: ast.FunctionDef) -> set[str]:
    """Return the attributes of `self` that a method sets."""
    return {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }


@pytest.mark.parametrize("name", upstream.TRAINER_ATTRIBUTES)
def test_the_trainer_sets_the_attribute_before_training(name: str) -> None:
    """Before `on_train_begin`, where the guard restores it."""
    loop = methods("transformers", "trainer.py", "Trainer")["_inner_training_loop"]
    assert name in assigned(loop)
    lines = {
        node.attr: node.lineno
        for node in ast.walk(loop)
        if isinstance(node, ast.Attribute) and node.attr in (name, "on_train_begin")
    }
    assert lines[name] < lines["on_train_begin"]


def test_the_trainer_loads_random_states_where_the_guard_expects_it() -> None:
    """They are loaded before the first batch, or after the skipped batches of a resumed epoch.

    After reading the batches if it is resumed inside.
    """
    source = ast.unparse(methods("transformers", "trainer.py", "Trainer")["_run_epoch"])
    at_the_beginning, after_the_batches = (
        source.index(f"self.{upstream.LOAD_RNG}("),
        source.rindex(f"self.{upstream.LOAD_RNG}("),
    )
    assert at_the_beginning < source.index("iter(train_dataloader)")
    assert source.index("get_batch_samples(") < after_the_batches < source.index("on_step_begin(")


@pytest.mark.parametrize(("file", "name"), [("grpo_trainer", "GRPOTrainer"), ("rloo_trainer", "RLOOTrainer")])
@pytest.mark.parametrize("attribute", [upstream.MICRO_STEP, upstream.BUFFERED_INPUTS, *upstream.TABLES])
def test_trl_trainers_have_the_attribute(file: str, name: str, attribute: str) -> None:
    """TRL does not save it; the exact state does."""
    assert attribute in assigned(methods("trl", f"trainer/{file}.py", name)["__init__"])


@pytest.mark.parametrize(("file", "name"), [("grpo_trainer", "GRPOTrainer"), ("rloo_trainer", "RLOOTrainer")])
def test_a_rollout_is_generated_when_the_last_one_is_used_up(file: str, name: str) -> None:
    """The exact state uses the same condition to omit a rollout that is used up."""
    source = ast.unparse(methods("trl", f"trainer/{file}.py", name)["_prepare_inputs"])
    assert "generate_every = self.args.steps_per_generation * self.num_iterations" in source
    assert "if self._step % generate_every == 0 or self._buffered_inputs is None:" in source
    assert "self._buffered_inputs[self._step % self.args.steps_per_generation]" in source


def test_sft_collects_metrics_under_the_same_name() -> None:
    """It has no rollouts, and counts the tokens it has trained on."""
    found = assigned(methods("trl", "trainer/sft_trainer.py", "SFTTrainer")["__init__"])
    assert {upstream.METRICS, upstream.TRAIN_TOKENS} <= found


def test_a_failed_sharded_save_reports_each_ranks_error(tmp_path: Path) -> None:
    """Torch's error of a real save into an impossible directory. It does not derive from `Exception`."""
    from torch.distributed import checkpoint

    taken = tmp_path / "file"
    taken.write_text("in the way")
    writer = checkpoint.FileSystemWriter(taken / "checkpoint")
    with pytest.raises(upstream.collective_save_error()) as raised:
        checkpoint.save({"weight": torch.ones(3)}, storage_writer=writer, no_dist=True)
    assert not isinstance(raised.value, Exception)
    (cause,) = upstream.save_errors(raised.value)
    assert isinstance(cause, NotADirectoryError)


def test_any_other_save_error_is_its_own_cause() -> None:
    """It is returned unchanged."""
    error = ValueError("one")
    assert upstream.save_errors(error) == [error]
