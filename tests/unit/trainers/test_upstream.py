"""Every private name of transformers and TRL that the guard leans on is still there; versions are compared."""

from __future__ import annotations

import ast
import functools
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from torch._C import _distributed_c10d

from grpo_run.runtime.errors import UntestedVersionError
from grpo_run.trainers import upstream


@functools.cache
def methods(package: str, file: str, name: str) -> dict[str, ast.FunctionDef]:
    """The methods that a class defines itself, from the installed source: importing it would cost seconds."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / file).read_text(encoding="utf-8"))
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}


def parameters(function: ast.FunctionDef) -> list[str]:
    """Names of the positional parameters."""
    return [argument.arg for argument in function.args.args]


@pytest.mark.parametrize("name", [*upstream.TRAINER_METHODS, "train", "evaluate", "training_step"])
def test_the_trainer_has_the_method(name: str) -> None:
    """What the guard wraps or replaces."""
    assert name in methods("transformers", "trainer.py", "Trainer")


def test_a_checkpoint_is_saved_by_model_and_trial() -> None:
    """The guard saves one itself when the script's schedule did not."""
    save = methods("transformers", "trainer.py", "Trainer")[upstream.SAVE_CHECKPOINT]
    assert parameters(save) == ["self", "model", "trial"]


def test_train_takes_what_the_guard_passes_on() -> None:
    """The checkpoint and the trial by position."""
    train = methods("transformers", "trainer.py", "Trainer")["train"]
    assert parameters(train)[:3] == ["self", "resume_from_checkpoint", "trial"]


def test_rotation_is_a_function_of_its_own() -> None:
    """The guard holds it back and calls it when the new checkpoint is published."""
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
def test_trls_trainers_have_the_method(file: str, name: str, method: str) -> None:
    """What the guard marks as generating, scoring and rewarding."""
    assert method in methods("trl", f"trainer/{file}.py", name)


def test_the_installed_versions_are_the_tested_ones() -> None:
    """This very environment is inside the ranges."""
    assert upstream.check_versions(allow_untested=False) == []


@pytest.mark.parametrize("range_", [">=1,<2", "<0.1"])
def test_a_version_outside_is_refused(range_: str) -> None:
    """With what was found, what was tested, and the way around."""
    with pytest.raises(UntestedVersionError, match=f"pytest {version('pytest')}.*--allow-untested"):
        upstream.check_versions(allow_untested=False, tested={"pytest": SpecifierSet(range_)})


def test_a_version_outside_may_be_allowed() -> None:
    """Then it is said, a sentence each."""
    (sentence,) = upstream.check_versions(allow_untested=True, tested={"pytest": SpecifierSet("<0.1")})
    assert sentence == f"pytest {version('pytest')} is outside the tested range <0.1"


def test_a_missing_library_is_refused_even_when_allowed() -> None:
    """There is nothing to go on with."""
    with pytest.raises(UntestedVersionError, match="not installed; install no-such-library"):
        upstream.check_versions(allow_untested=True, tested={"no-such-library": SpecifierSet(">=1")})


@pytest.mark.parametrize(
    ("found", "inside"),
    [("2.13.0+cpu", True), ("2.13.1+cu130", True), ("2.13.0", True), ("2.14.0", False), ("2.12.9", False)],
)
def test_a_local_build_is_the_version_it_is_built_from(
    monkeypatch: pytest.MonkeyPatch, found: str, inside: bool
) -> None:
    """Torch's wheels carry the accelerator in their version."""
    monkeypatch.setattr(upstream, "version", lambda name: found)
    strange = upstream.check_versions(allow_untested=True, tested={"torch": upstream.TESTED["torch"]})
    assert (strange == []) is inside


def test_what_is_missing_is_told_from_what_is_strange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the metadata is asked; nothing is imported."""

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(upstream, "version", missing)
    with pytest.raises(UntestedVersionError, match="not installed"):
        upstream.check_versions(allow_untested=False)


@pytest.mark.parametrize("name", [*upstream.COLLECTIVE_METHODS, upstream.GROUP_SEQUENCE, "group_name"])
def test_torchs_process_group_has_the_method(name: str) -> None:
    """What is not there is not wrapped, and its collectives would have no line."""
    assert hasattr(_distributed_c10d.ProcessGroup, name)


def test_every_collective_of_torchs_process_group_is_known() -> None:
    """One that a release adds would go without a note; `monitored_barrier` is made of sends."""
    words = ("reduce", "gather", "scatter", "broadcast", "alltoall", "all_to_all", "barrier")
    found = {
        name
        for name in dir(_distributed_c10d.ProcessGroup)
        if not name.startswith("__") and any(word in name for word in words)
    }
    assert found - {"monitored_barrier"} == set(upstream.COLLECTIVE_METHODS)


def test_what_takes_outputs_first_is_a_collective() -> None:
    """The table of arguments is about listed methods only; those that change their tensors are not in it."""
    assert set(upstream.COLLECTIVE_METHODS) > upstream.OUTPUT_FIRST
    in_place = {name for name in upstream.COLLECTIVE_METHODS if name not in upstream.OUTPUT_FIRST}
    assert in_place == {"allreduce", "allreduce_coalesced", "barrier", "broadcast", "reduce"}


@pytest.mark.parametrize("name", ["wait", "is_completed"])
def test_torchs_work_has_the_method(name: str) -> None:
    """Wrapped, to see who waits."""
    assert callable(getattr(_distributed_c10d.Work, name))


def test_torch_has_a_worker_server() -> None:
    """Of a path alone, with a way to end it."""
    server = getattr(_distributed_c10d, upstream.WORKER_SERVER)
    assert callable(server.shutdown)
    assert "host_or_file: str" in (server.__init__.__doc__ or "")
