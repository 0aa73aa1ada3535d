"""What the code of transformers' and TRL's trainers still does; their names are in `test_releases.py`."""

from __future__ import annotations

import ast
import functools
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from grpo_run.runtime.upstream import rollout_names, trainer_names
from grpo_run.runtime.upstream.trainer_kinds import TRAINERS, KnownTrainer


@functools.cache
def methods(package: str, file: str, name: str) -> dict[str, ast.FunctionDef]:
    """Return the methods that a class defines itself, parsed from the source: an import would take
    seconds.
    """
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / file).read_text(encoding="utf-8"))
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}


def parameters(function: ast.FunctionDef) -> list[str]:
    """Return the names of the positional parameters."""
    return [argument.arg for argument in function.args.args]


def assigned(function: ast.FunctionDef) -> set[str]:
    """Return the attributes of `self` that a method sets."""
    return {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }


def test_what_scripts_that_train_by_themselves_call_is_public() -> None:
    """An optimizer step runs a hook."""
    assert "register_optimizer_step_pre_hook" in sys.modules["torch.optim.optimizer"].__all__
    assert callable(torch.compiler.is_compiling)


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        (trainer_names.SAVE_CHECKPOINT, ["self", "model", "trial"], "trial"),
        ("train", ["self", "resume_from_checkpoint", "trial"], None),
        (trainer_names.LOAD_RNG, ["self"], "checkpoint"),
        (trainer_names.FINALIZE, ["self"], "start_time"),
        (trainer_names.PUSH, ["self", "checkpoint_folder"], "checkpoint_folder"),
    ],
)
def test_a_method_that_is_called_or_wrapped_has_its_parameters(
    name: str, first: list[str], last: str | None
) -> None:
    """They are passed on by position."""
    found = parameters(methods("transformers", "trainer.py", "Trainer")[name])
    assert found[: len(first)] == first
    assert last in (None, found[-1])


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


TRL_TRAINERS = [("grpo_trainer", "GRPOTrainer"), ("rloo_trainer", "RLOOTrainer")]


@pytest.mark.parametrize("name", trainer_names.TRAINER_ATTRIBUTES)
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
        source.index(f"self.{trainer_names.LOAD_RNG}("),
        source.rindex(f"self.{trainer_names.LOAD_RNG}("),
    )
    assert at_the_beginning < source.index("iter(train_dataloader)")
    assert source.index("get_batch_samples(") < after_the_batches < source.index("on_step_begin(")


@pytest.mark.parametrize(("file", "name"), TRL_TRAINERS)
def test_a_rollout_is_generated_when_the_last_one_is_used_up(file: str, name: str) -> None:
    """The exact state uses the same condition to omit a rollout that is used up."""
    source = ast.unparse(methods("trl", f"trainer/{file}.py", name)["_prepare_inputs"])
    assert "generate_every = self.args.steps_per_generation * self.num_iterations" in source
    assert "if self._step % generate_every == 0 or self._buffered_inputs is None:" in source
    assert "self._buffered_inputs[self._step % self.args.steps_per_generation]" in source


def returned_keys(function: ast.FunctionDef) -> set[str]:
    """The keys of the dictionary `output` that a method builds."""
    return {
        key.value
        for node in ast.walk(function)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Dict)
        for key in node.value.keys
        if isinstance(key, ast.Constant)
    } | {
        node.slice.value
        for node in ast.walk(function)
        if isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.slice, ast.Constant)
    }


@pytest.mark.parametrize(
    ("file", "name", "keys"),
    [
        ("grpo_trainer", "GRPOTrainer", {rollout_names.TOOL_MASK, rollout_names.ITEMS}),
        ("rloo_trainer", "RLOOTrainer", {rollout_names.OLD_LOGPS}),
    ],
)
def test_a_rollout_has_the_keys_that_are_masked(file: str, name: str, keys: set[str]) -> None:
    """Both trainers' rollouts, and which of the two a rollout is."""
    found = methods("trl", f"trainer/{file}.py", name)
    keys = keys | {rollout_names.COMPLETION_MASK, rollout_names.ADVANTAGES}
    assert keys <= returned_keys(found[trainer_names.GENERATE_AND_SCORE])
    loss = ast.unparse(found["_compute_loss"])
    assert all(f"inputs['{key}']" in loss for key in keys)


@pytest.mark.parametrize(("file", "name"), TRL_TRAINERS)
def test_log_probabilities_are_computed_of_tokens_and_mask(file: str, name: str) -> None:
    """Which a rollout has for prompt and completion; they come first in what is returned."""
    found = methods("trl", f"trainer/{file}.py", name)
    score = found[rollout_names.SCORE]
    assert tuple(one.arg for one in score.args.args[1:4]) == rollout_names.SCORED
    assert "return (logps, " in ast.unparse(score)
    call = f"self.{rollout_names.SCORE}(model, input_ids, attention_mask, logits_to_keep"
    assert call in ast.unparse(found["_compute_loss"])
    keys = (rollout_names.PROMPT_IDS, rollout_names.PROMPT_MASK, rollout_names.COMPLETION_IDS)
    assert {*keys, rollout_names.COMPLETION_MASK} <= returned_keys(found[trainer_names.GENERATE_AND_SCORE])


@pytest.mark.parametrize(("file", "name"), TRL_TRAINERS)
def test_rewards_are_a_table_in_which_nan_stands_for_none(file: str, name: str) -> None:
    """Functions are called with keywords; the table is gathered last, and rows of NaN leave the baseline."""
    found = methods("trl", f"trainer/{file}.py", name)
    rewards = ast.unparse(found[trainer_names.CALCULATE_REWARDS])
    assert f"{rollout_names.COMPLETION_IDS}=completion_ids_list" in rewards
    assert rewards.rstrip().endswith(
        "rewards_per_func = gather(rewards_per_func)\n    return rewards_per_func"
    )
    scoring = ast.unparse(found[trainer_names.GENERATE_AND_SCORE])
    assert "unscorable_mask = torch.isnan(rewards_per_func).all(dim=1)" in scoring
    assert "rewards[unscorable_mask] = torch.nan" in scoring
    assert f"['{rollout_names.ZERO_STD}'].append(is_std_zero.float().mean().item())" in scoring


def test_the_trainer_calls_tools_where_they_are_marked() -> None:
    """One method calls all tools of a rollout, from two lists of dictionaries by name."""
    called = ast.unparse(methods("trl", "trainer/grpo_trainer.py", "GRPOTrainer")[trainer_names.TOOL_CALLS])
    for name in (trainer_names.SYNC_TOOLS, trainer_names.ASYNC_TOOLS):
        assert f"self.{name}[idx_with_tool]" in called
    made = ast.unparse(
        methods("trl", "trainer/grpo_trainer.py", "GRPOTrainer")[trainer_names.GENERATE_AND_SCORE]
    )
    assert f"self.{trainer_names.ENVIRONMENTS}[name]" in made
    assert "environment.reset(" in made


@pytest.mark.parametrize("known", TRAINERS.values(), ids=TRAINERS)
def test_known_trainers_and_their_configurations_are_where_they_are_looked_for(known: KnownTrainer) -> None:
    """Otherwise nothing would be excluded, and no plan would be applied."""
    for module, name in ((known.module, known.name), (known.configuration_module, known.configuration)):
        package, _, rest = module.partition(".")
        assert methods(package, f"{rest.replace('.', '/')}.py", name)
