"""Recipes load, and an invalid recipe gives one line that says what is wrong and where."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from grpo_run.runtime.errors import ConfigError
from grpo_run.trainers.recipes.recipe import (
    GrpoSection,
    SftSection,
    load_recipe,
    packaged_recipes,
    setting_keys,
)

MINIMAL = """\
task: arithmetic
output_dir: out
grpo:
  max_steps: 10
  per_device_train_batch_size: 8
  learning_rate: 1e-4
  save_steps: 5
  num_generations: 8
  max_completion_length: 16
"""


def write_recipe(folder: Path, text: str, name: str = "mine.yaml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def error(*arguments: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(*arguments)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", packaged_recipes())
def test_packaged_recipes_load_and_train_on_rollout_boundaries(name: str) -> None:
    """Plain TRL does not save a rollout in progress, and rejects one that is no multiple of a group."""
    recipe = load_recipe(name)
    assert (recipe.task, recipe.output_dir) == (name, f"runs-output/{name}")
    grpo = recipe.grpo
    rollout = (grpo.steps_per_generation or grpo.gradient_accumulation_steps) * (grpo.num_iterations or 1)
    assert grpo.save_steps * grpo.gradient_accumulation_steps % rollout == 0
    assert grpo.max_steps % grpo.save_steps == 0
    assert grpo.save_total_limit >= 2
    for ranks in (1, 2, 4):
        rows = grpo.per_device_train_batch_size * (grpo.steps_per_generation or 1) * ranks
        assert rows % grpo.num_generations == 0


def test_loading_imports_no_training_library() -> None:
    """The launcher validates a recipe before it starts anything, without the time to import torch."""
    code = (
        "import sys; from grpo_run.trainers.recipes.recipe import load_recipe; load_recipe('gsm8k');"
        "print(sorted({'torch','transformers','trl','datasets','numpy'} & set(sys.modules)))"
    )
    command = [sys.executable, "-P", "-c", code]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert printed.stdout.strip() == "[]"


def test_a_packaged_name_takes_precedence_over_awrite_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file called `arithmetic` does not change what `grpo-run train arithmetic` means."""
    write_recipe(tmp_path, "task: nonsense", "arithmetic")
    monkeypatch.chdir(tmp_path)
    assert load_recipe("arithmetic").task == "arithmetic"


def test_a_recipe_file_is_found_by_path(tmp_path: Path) -> None:
    """1e-4 is a number, although YAML 1.1 reads it as text."""
    recipe = load_recipe(write_recipe(tmp_path, MINIMAL))
    assert recipe.grpo.learning_rate == 1e-4
    assert recipe.sft is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("arithmatic", "did you mean 'arithmetic'?"),
        ("gsm8", "did you mean 'gsm8k'?"),
        ("GSM8K", "did you mean 'gsm8k'?"),
        ("zzzzz", "unknown recipe 'zzzzz'; available: arithmetic, gsm8k, memgen-arithmetic"),
        ("", "unknown recipe ''"),
        ("none.yaml", "'none.yaml' does not exist"),
        ("..", "'..' is a directory"),
    ],
)
def test_an_unknown_recipe_is_one_line(name: str, words: str) -> None:
    """The error names the nearest packaged recipe, or all of them."""
    assert words in error(name)


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("grpo.learnin_rate=1", "grpo.learning_rate"),
        ("learning_rate=1", "learning_rate"),
        ("grpo.beta2=1", "beta"),
        ("ouput_dir=x", "output_dir"),
        ("sft.max_step=3", "sft.max_steps"),
    ],
)
def test_an_unknown_override_gets_a_hint(override: str, near: str) -> None:
    """The error names the nearest key, also if the section is missing."""
    message = error("arithmetic", [override])
    assert repr(override.partition("=")[0]) in message
    assert f"{near}'?" in message


def test_an_unknown_key_in_a_file_is_named(tmp_path: Path) -> None:
    """File, key and nearest key, at the top level and in a section."""
    path = write_recipe(tmp_path, MINIMAL + "  num_generation: 4\n")
    assert error(path) == f"{path}: unknown key 'grpo.num_generation'; did you mean 'grpo.num_generations'?"
    path = write_recipe(tmp_path, MINIMAL + "sed: 4\n")
    assert error(path) == f"{path}: unknown key 'sed'; did you mean 'seed'?"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("grpo.learning_rate=fast", ("grpo.learning_rate = 'fast'", "valid number")),
        ("grpo.learning_rate=nan", ("finite",)),
        ("grpo.learning_rate=0", ("greater than 0",)),
        ("grpo.max_steps=1.5", ("grpo.max_steps = '1.5'", "valid integer")),
        ("grpo.bf16=perhaps", ("grpo.bf16 = 'perhaps'", "valid boolean")),
        ("grpo.vllm_mode=both", ("'colocate' or 'server'",)),
        ("grpo.save_total_limit=1", ("greater than or equal to 2",)),
        ("grpo=5", ("grpo = '5'", "section")),
        ("grpo=null", ("grpo = None", "section")),
        ("task=chess", ("task = 'chess'", "'arithmetic', 'gsm8k', 'memgen-arithmetic' or 'memgen-gsm8k'")),
        ("model=", ("model = ''",)),
        ("seed=null", ("seed = None", "valid integer")),
        ("grpo.generation_kwargs=[1]", ("grpo.generation_kwargs", "valid dictionary")),
        ("grpo.reward_weights=[1, x]", ("grpo.reward_weights.1 = 'x'", "valid number")),
    ],
)
def test_a_wrong_value_is_shown_with_what_is_expected(override: str, words: tuple[str, ...]) -> None:
    """Key, value and expectation in one line."""
    message = error("arithmetic", [override])
    assert message.startswith("--set: ")
    for word in words:
        assert word in message


def test_a_wrong_value_in_a_file_is_named(tmp_path: Path) -> None:
    """File, key, value and expectation."""
    path = write_recipe(tmp_path, MINIMAL.replace("max_steps: 10", "max_steps: ten"))
    assert error(path) == f"{path}: grpo.max_steps = 'ten', expected a valid integer"


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    """The error names the file too."""
    path = write_recipe(tmp_path, MINIMAL.replace("  save_steps: 5\n", ""))
    assert error(path) == f"{path}: the key 'grpo.save_steps' is missing"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("grpo:\n  learning_rate: [1\nseed: 3\n", ", line 3, column 5: expected ',' or ']'"),
        ("task: a\n  b: c\n", ", line 2, column 4: mapping values are not allowed"),
        ("seed: !!python/object:os.system x\n", ", line 1, column 7: could not determine a constructor"),
        ("a: 1\n---\nb: 2\n", ", line 2, column 1: but found another document"),
        ("seed: \x00\n", ": invalid YAML: unacceptable character"),
        ("seed: 2020-99-99\n", ": invalid YAML: month must be in 1..12"),
        ("seed: 1\nseed: 2\n", ", line 2, column 1: duplicate key 'seed'"),
        ("grpo.beta: 1\n", ": expected a key without dots, found 'grpo.beta'"),
        ("1: 2\n", ": expected a key without dots, found 1"),
        ("- a\n", ": expected a mapping of keys to values"),
        ("", ": expected a mapping of keys to values"),
        ("seed: " + "[" * 5000, ": invalid YAML: "),
    ],
)
def test_malformed_yaml_is_located(tmp_path: Path, text: str, place: str) -> None:
    """File, line, column and problem, as the YAML parser reports them."""
    path = write_recipe(tmp_path, text)
    assert error(path).startswith(path + place)


def test_a_file_that_is_not_text_or_too_large_is_rejected(tmp_path: Path) -> None:
    """Bytes that are not UTF-8, and a file larger than any recipe."""
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"seed: \xff\xfe\n")
    assert "invalid YAML" in error(str(path))
    path.write_bytes(b"#" * (2 << 20))
    assert "larger than" in error(str(path))


@pytest.mark.parametrize("override", ["grpo", "", "=3", " =3"])
def test_an_override_without_key_or_value_is_an_error(override: str) -> None:
    """`--set` expects key=value."""
    assert error("arithmetic", [override]).endswith("expected key=value")


def test_an_override_with_an_invalid_list_is_an_error() -> None:
    """Lists and mappings are parsed as YAML."""
    assert "expected ',' or ']'" in error("gsm8k", ["grpo.reward_weights=[1"])


def test_overrides_replace_settings_of_thewrite_recipe() -> None:
    """Dotted keys, top-level keys, lists, mappings and null; the last one of a key wins."""
    recipe = load_recipe(
        "arithmetic",
        [
            "grpo.learning_rate=1e-5", "model=123", "output_dir=a=b", "seed=1", "seed=7", "grpo.beta=null",
            "grpo.generation_kwargs={no_repeat_ngram_size: 3}", "grpo.bf16=true",
            "grpo.report_to=[tensorboard]",
        ],
    )  # fmt: skip
    assert recipe.grpo.learning_rate == 1e-5
    assert (recipe.model, recipe.output_dir, recipe.seed) == ("123", "a=b", 7)
    assert recipe.grpo.beta is None
    assert recipe.grpo.generation_kwargs == {"no_repeat_ngram_size": 3}
    assert recipe.grpo.bf16 is True
    assert recipe.grpo.report_to == ["tensorboard"]


def test_a_section_and_its_keys_replace_each_other() -> None:
    """`sft=null` disables the warm start; setting one of its keys afterwards starts an empty section."""
    assert load_recipe("arithmetic", ["sft.max_steps=5", "sft=null"]).sft is None
    assert "is missing" in error("arithmetic", ["sft=null", "sft.max_steps=5"])


def test_keys_that_do_not_fit_the_task_are_errors(tmp_path: Path) -> None:
    """Data for generated sums, a warm start for GSM8K, and weights for missing rewards."""
    assert "remove 'data'" in error("arithmetic", ["data=x"])
    assert "reward_weights has length 1, expected 2" in error("gsm8k", ["grpo.reward_weights=[1]"])
    text = MINIMAL.replace("arithmetic", "gsm8k\nmodel: some/model")
    text += "sft:\n  max_steps: 1\n  per_device_train_batch_size: 1\n  learning_rate: 1\n  save_steps: 1\n"
    path = write_recipe(tmp_path, text)
    assert error(path) == f"{path}: gsm8k has a warm start for model: tiny only; remove 'sft'"
    assert "needs section 'weaver'" in error("memgen-arithmetic", ["weaver=null"])
    assert "has no section 'memgen'" in error("arithmetic", ["memgen.evaluation_problems=1"])


def test_local_models_and_data_must_exist(tmp_path: Path) -> None:
    """Paths are checked before anything starts."""
    assert "'./nowhere'" in error("gsm8k", ["model=./nowhere"])
    assert "/nowhere/data" in error("gsm8k", ["data=/nowhere/data"])
    bad = tmp_path / "train.jsonl"
    bad.write_text('{"question": "1+1?", "answer": "#### 2"}\n{"question": \n', encoding="utf-8")
    assert f"{bad}:2: invalid JSON" in error("gsm8k", [f"data={tmp_path}"])


def test_every_known_key_is_accepted(tmp_path: Path) -> None:
    """The keys that hints offer are keys of the sections."""
    recipe = load_recipe("arithmetic").model_dump()
    assert {key for key in setting_keys() if "." not in key} == set(recipe)
    assert {key for key in setting_keys() if key.startswith("grpo.")} == {
        f"grpo.{key}" for key in recipe["grpo"]
    }
    assert load_recipe(write_recipe(tmp_path, yaml.safe_dump(recipe))).model_dump() == recipe


def test_sections_contain_only_keys_of_trl() -> None:
    """Every key is an argument of TRL's configuration class in the installed release."""
    from dataclasses import fields

    from trl import GRPOConfig, SFTConfig

    assert set(GrpoSection.model_fields) <= {field.name for field in fields(GRPOConfig)}
    assert set(SftSection.model_fields) <= {field.name for field in fields(SFTConfig)}


def test_the_guards_of_a_recipe_are_checked() -> None:
    """Before a process is started, and with the place of the setting."""
    assert load_recipe("arithmetic", ['guards=["kl=stop:3"]']).guards == ["kl=stop:3"]
    with pytest.raises(ConfigError, match=r"did you mean roll-back\?"):
        load_recipe("arithmetic", ['guards=["kl=rollback"]'])


def test_the_caps_of_a_recipe_are_checked() -> None:
    """A section of their own, because TRL does not know them."""
    recipe = load_recipe("arithmetic", ["caps.repetition=64", "caps.max_time=2.5"])
    assert recipe.caps is not None
    assert (recipe.caps.repetition, recipe.caps.max_time) == (64, 2.5)
    assert load_recipe("arithmetic").caps is None
    with pytest.raises(ConfigError, match=r"caps\.repetition = '7', expected"):
        load_recipe("arithmetic", ["caps.repetition=7"])


def test_the_tiny_model_has_sections_of_its_own() -> None:
    """They take the place of the others, and `--set` wins over them."""
    recipe = load_recipe("gsm8k", ["model=tiny", "grpo.max_steps=7", "sft.save_steps=9"])
    assert recipe.sft is not None
    assert (recipe.sft.max_steps, recipe.sft.save_steps) == (100, 9)
    assert (recipe.grpo.max_steps, recipe.grpo.bf16, recipe.caps) == (7, False, None)
    assert load_recipe("gsm8k", ["model=tiny", "sft=null"]).sft is None
    plain = load_recipe("gsm8k")
    assert (plain.sft, plain.grpo.bf16) == (None, True)
