"""Contract with TRL's generation with vLLM: the names that are used exist, and are looked up when they are
needed, so that a wrapper of the instance is called.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from importlib.util import find_spec
from pathlib import Path

import pytest

from grpo_run.runtime.upstream import vllm_names as names


def source(file: str) -> str:
    """Return the source of a module of TRL; importing it would take seconds."""
    spec = find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / file
    if not path.exists():
        pytest.skip(f"this TRL has no {file}")
    return path.read_text(encoding="utf-8")


def method(file: str, name: str) -> ast.FunctionDef:
    """Return a method by its name, which is the only one in the module."""
    tree = ast.walk(ast.parse(source(file)))
    (found,) = [node for node in tree if isinstance(node, ast.FunctionDef) and node.name == name]
    return found


def parameters(function: ast.FunctionDef) -> list[str]:
    """Return the names of the positional parameters."""
    return [argument.arg for argument in function.args.args]


@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_trainers_generate_through_one_object(trainer: str) -> None:
    """And send the weights before."""
    text = source(f"trainer/{trainer}_trainer.py")
    assert f"self.{names.GENERATION} = VLLMGeneration(" in text
    turn = ast.unparse(method(f"trainer/{trainer}_trainer.py", "_generate_single_turn"))
    sends, generates = (f"self.{names.GENERATION}.{one}(" for one in (names.SYNC, names.GENERATE))
    assert turn.index(sends) < turn.index(generates)


def test_the_object_sends_and_generates_through_its_client() -> None:
    """On the main process."""
    file = "generation/vllm_generation.py"
    assert parameters(method(file, names.SYNC)) == ["self"]
    assert f"self.{names.CLIENT}.{names.SEND}(self._weight_metadata, " in source(file)
    generate = ast.unparse(method(file, names.GENERATE))
    assert f"self.{names.CLIENT}.generate(" in generate
    assert "return (prompt_ids, completion_ids, " in generate


def test_the_client_has_what_is_called_and_read() -> None:
    """Its session has TRL's retries; the group can be made anew."""
    file = "generation/vllm_client.py"
    for name in names.CLIENT_GENERATES:
        assert "generation_kwargs" in parameters(method(file, name))
    assert parameters(method(file, names.SEND))[:3] == ["self", "metadata", "named_params"]
    assert parameters(method(file, names.JOIN)) == ["self", "device"]
    assert parameters(method(file, names.LEAVE)) == ["self"]
    made = ast.unparse(method(file, "__init__"))
    for name in ("session", "base_url", "model"):
        assert f"self.{name} = " in made


def test_nothing_is_sent_before_the_client_has_joined_the_group() -> None:
    """The client of servers has one class, which generation joins with at once."""
    assert names.CLIENT_MODULES[0] == "trl.generation.vllm_client"
    assert f"class {names.CLIENT_CLASS}:" in source("generation/vllm_client.py")
    text = source("generation/vllm_generation.py")
    made = text.index(f"self.{names.CLIENT} = {names.CLIENT_CLASS}(")
    assert text.index(f"self.{names.CLIENT}.", made) == text.index(f"self.{names.CLIENT}.{names.JOIN}(")


def test_the_difference_of_log_probabilities_is_a_metric() -> None:
    """A mean over all ranks."""
    scoring = ast.unparse(method("trainer/grpo_trainer.py", "_generate_and_score_completions"))
    assert (
        f"self._metrics[mode]['{names.DIFFERENCE}'].append(self.accelerator.gather(mean_delta).mean().item())"
    ) in scoring


def test_async_grpo_sends_weights_in_two_ways() -> None:
    """It looks them up on the trainer each time."""
    file = "experimental/async_grpo/async_grpo_trainer.py"
    sync = ast.unparse(method(file, "_sync_weight"))
    assert all(f"self.{name}(t0)" in sync for name in names.ASYNC_SYNCS)


@pytest.mark.parametrize(
    ("module", "configuration", "fields"),
    [
        ("trl.trainer.grpo_config", "GRPOConfig", ("HOST", "PORT", "GROUP_PORT")),
        ("trl.trainer.rloo_config", "RLOOConfig", ("HOST", "PORT", "GROUP_PORT")),
        ("trl.experimental.async_grpo.async_grpo_config", "AsyncGRPOConfig", ()),
    ],
)
def test_configurations_name_the_server(module: str, configuration: str, fields: tuple[str, ...]) -> None:
    """And initialize those that they derive from, where the address is set, before they read it."""
    kind = getattr(pytest.importorskip(module), configuration)
    present = {one.name for one in dataclasses.fields(kind)}
    assert {names.BASE_URL, names.SERVER_TIMEOUT, *(getattr(names, one) for one in fields)} <= present
    lines = inspect.getsource(kind.__post_init__)
    assert "super().__post_init__()" in lines
    assert names.BASE_URL not in lines.partition("super().__post_init__()")[0]
