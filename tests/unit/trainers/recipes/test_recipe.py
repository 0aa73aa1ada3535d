"""What a recipe may say, and the one line a user gets when it says something else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

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


def _file(folder: Path, text: str, name: str = "mine.yaml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def _refused(*arguments: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(*arguments)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", packaged_recipes())
def test_every_packaged_recipe_loads(name: str) -> None:
    """A recipe that ships is one that loads, under its own name."""
    recipe = load_recipe(name)
    assert recipe.task == name
    assert recipe.output_dir == f"runs-output/{name}"


@pytest.mark.parametrize("name", packaged_recipes())
def test_packaged_recipes_save_on_rollout_boundaries(name: str) -> None:
    """Every checkpoint of a packaged recipe lies where a rollout ends, so that resuming is exact."""
    grpo = load_recipe(name).grpo
    rollout = (grpo.steps_per_generation or grpo.gradient_accumulation_steps) * (grpo.num_iterations or 1)
    assert grpo.save_steps * grpo.gradient_accumulation_steps % rollout == 0
    assert grpo.max_steps % grpo.save_steps == 0
    assert grpo.save_total_limit >= 2


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", packaged_recipes())
def test_packaged_batches_hold_whole_groups(name: str, ranks: int) -> None:
    """TRL refuses a rollout that is no multiple of the group; the shipped settings never are one."""
    grpo = load_recipe(name).grpo
    rollout = grpo.per_device_train_batch_size * (grpo.steps_per_generation or 1) * ranks
    assert rollout % grpo.num_generations == 0


def test_loading_imports_no_training_library() -> None:
    """The launcher checks a recipe before it starts anything; that must not cost torch's import."""
    code = (
        "import sys; from grpo_run.trainers.recipes.recipe import load_recipe; load_recipe('gsm8k');"
        "print(sorted({'torch','transformers','trl','datasets','numpy'} & set(sys.modules)))"
    )
    command = [sys.executable, "-P", "-c", code]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert printed.stdout.strip() == "[]"


def test_a_packaged_name_goes_before_a_file_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stray file called `arithmetic` does not change what `grpo-run train arithmetic` means."""
    _file(tmp_path, "task: nonsense", "arithmetic")
    monkeypatch.chdir(tmp_path)
    assert load_recipe("arithmetic").task == "arithmetic"


def test_a_file_of_ones_own_is_found_by_path(tmp_path: Path) -> None:
    """Any path of a YAML file is a recipe; 1e-4 is a number though YAML 1.1 reads text."""
    recipe = load_recipe(_file(tmp_path, MINIMAL))
    assert recipe.grpo.learning_rate == 1e-4
    assert recipe.sft is None


@pytest.mark.parametrize(
    ("name", "near"), [("arithmatic", "arithmetic"), ("gsm8", "gsm8k"), ("GSM8K", "gsm8k")]
)
def test_an_unknown_recipe_is_told_its_nearest_name(name: str, near: str) -> None:
    """A typing error in the recipe's name."""
    message = _refused(name)
    assert repr(name) in message
    assert repr(near) in message


def test_a_recipe_unlike_any_lists_what_there_is() -> None:
    """Nothing near: say what there is."""
    assert "known are arithmetic, gsm8k" in _refused("zzzzz")


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    """A path that leads nowhere, and one that leads to a directory."""
    assert "does not exist" in _refused(str(tmp_path / "none.yaml"))
    assert "directory" in _refused(str(tmp_path))
    assert "unknown recipe ''" in _refused("")


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
def test_an_unknown_override_is_told_its_nearest_key(override: str, near: str) -> None:
    """A typing error in a key, sections' keys without their section included."""
    message = _refused("arithmetic", [override])
    assert repr(override.partition("=")[0]) in message
    assert f"{near}'?" in message


def test_an_unknown_key_in_a_file_is_located(tmp_path: Path) -> None:
    """File, line, key and nearest key, at the top and in a section."""
    path = _file(tmp_path, MINIMAL + "  num_generation: 4\n")
    assert (
        _refused(path)
        == f"{path}:10: unknown key 'grpo.num_generation'; did you mean 'grpo.num_generations'?"
    )
    path = _file(tmp_path, MINIMAL + "sed: 4\n")
    assert _refused(path) == f"{path}:10: unknown key 'sed'; did you mean 'seed'?"


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
        ("task=chess", ("task = 'chess'", "'arithmetic' or 'gsm8k'")),
        ("model=", ("model = ''",)),
        ("seed=null", ("seed = None", "valid integer")),
        ("grpo.generation_kwargs=[1]", ("grpo.generation_kwargs", "valid dictionary")),
        ("grpo.reward_weights=[1, x]", ("grpo.reward_weights.1 = 'x'", "valid number")),
    ],
)
def test_a_wrong_value_is_shown_with_what_was_expected(override: str, words: tuple[str, ...]) -> None:
    """Key, value and expectation in one line."""
    message = _refused("arithmetic", [override])
    assert message.startswith("--set: ")
    for word in words:
        assert word in message


def test_a_wrong_value_in_a_file_is_located(tmp_path: Path) -> None:
    """File and line, key, value, expected."""
    path = _file(tmp_path, MINIMAL.replace("max_steps: 10", "max_steps: ten"))
    assert _refused(path) == f"{path}:4: grpo.max_steps = 'ten', expected a valid integer"


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    """Which key a file lacks."""
    path = _file(tmp_path, MINIMAL.replace("  save_steps: 5\n", ""))
    assert _refused(path) == f"{path}: 'grpo.save_steps' is missing"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("grpo:\n  learning_rate: [1\nseed: 3\n", ", line 3, column 5: expected ',' or ']'"),
        ("task: a\n  b: c\n", ", line 2, column 4: mapping values are not allowed"),
        ("task: 'open\n", ", line 2, column 1: found unexpected end of stream"),
        ("\tx: 1\n", ", line 1, column 1: found character '\\t'"),
        ("seed: *nowhere\n", ", line 1, column 7: found undefined alias 'nowhere'"),
        ("seed: !!python/object:os.system x\n", ", line 1, column 7: could not determine a constructor"),
        ("a: 1\n---\nb: 2\n", ", line 2, column 1: but found another document"),
        ("seed: \x00\n", ": not YAML: unacceptable character"),
        ("seed: 2020-99-99\n", ": not YAML: month must be in 1..12"),
        ("seed: &a [*a]\n", ", line 1, column 7: found unconstructable recursive node"),
        ("seed: 1\nseed: 2\n", ":2: 'seed' is given twice; it is first on line 1"),
        ("grpo.beta: 1\n", ":1: keys are plain words; found 'grpo.beta'"),
        ("1: 2\n", ":1: keys are plain words; found 1"),
        ("- a\n", ": a recipe is a mapping of keys to values; found a list"),
        ("hello\n", ": a recipe is a mapping of keys to values; found a single value"),
        ("", ": a recipe is a mapping of keys to values; found nothing"),
        ("seed: " + "[" * 5000, ": not YAML: "),
    ],
)
def test_malformed_yaml_is_located(tmp_path: Path, text: str, place: str) -> None:
    """File, line, column and problem, as the YAML reader tells them."""
    path = _file(tmp_path, text)
    assert _refused(path).startswith(path + place)


def test_a_file_that_is_no_text_or_no_recipe_is_refused(tmp_path: Path) -> None:
    """Bytes that are no UTF-8, and a file of a size no recipe has, are not read on."""
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"seed: \xff\xfe\n")
    assert "not YAML" in _refused(str(path))
    path.write_bytes(b"#" * (2 << 20))
    assert "larger than" in _refused(str(path))


@pytest.mark.parametrize("override", ["grpo", "", "=3", " =3"])
def test_an_override_without_key_and_value_is_refused(override: str) -> None:
    """`--set` wants key=value."""
    assert _refused("arithmetic", [override]).endswith("expected key=value")


def test_an_override_with_an_open_list_is_refused() -> None:
    """Lists and mappings are YAML, and broken ones are told so."""
    assert "expected ',' or ']'" in _refused("gsm8k", ["grpo.reward_weights=[1"])


def test_overrides_replace_what_the_file_says() -> None:
    """Dotted keys, top-level keys, lists, mappings, null; the last of two wins."""
    recipe = load_recipe(
        "arithmetic",
        [
            "grpo.learning_rate=1e-5", "model=123", "output_dir=a=b", "seed=1", "seed=7", "grpo.beta=null",
            "grpo.generation_kwargs={no_repeat_ngram_size: 3}", "grpo.bf16=true", "grpo.report_to=[tensorboard]",
        ],
    )  # fmt: skip
    assert recipe.grpo.learning_rate == 1e-5
    assert (recipe.model, recipe.output_dir, recipe.seed) == ("123", "a=b", 7)
    assert recipe.grpo.beta is None
    assert recipe.grpo.generation_kwargs == {"no_repeat_ngram_size": 3}
    assert recipe.grpo.bf16 is True
    assert recipe.grpo.report_to == ["tensorboard"]


def test_a_null_section_and_its_keys_push_each_other_out() -> None:
    """`sft=null` turns the warm start off; a key of it after that would have to bring all the others."""
    assert load_recipe("arithmetic", ["sft.max_steps=5", "sft=null"]).sft is None
    assert "is missing" in _refused("arithmetic", ["sft=null", "sft.max_steps=5"])


def test_keys_that_do_not_fit_the_task_are_refused(tmp_path: Path) -> None:
    """What no single key can tell: data for made-up sums, a warm start for GSM8K, weights for absent rewards."""
    assert "leave 'data' out" in _refused("arithmetic", ["data=x"])
    assert "reward_weights has length 1" in _refused("gsm8k", ["grpo.reward_weights=[1]"])
    text = MINIMAL.replace("arithmetic", "gsm8k")
    text += "sft:\n  max_steps: 1\n  per_device_train_batch_size: 1\n  learning_rate: 1\n  save_steps: 1\n"
    path = _file(tmp_path, text)
    assert _refused(path) == f"{path}:11: the gsm8k task has no warm start; leave 'sft' out"


def test_local_models_and_data_must_be_there(tmp_path: Path) -> None:
    """What looks like a path is looked for before anything starts."""
    assert "'./nowhere'" in _refused("gsm8k", ["model=./nowhere"])
    assert "/nowhere/data" in _refused("gsm8k", ["data=/nowhere/data"])
    bad = tmp_path / "train.jsonl"
    bad.write_text('{"question": "1+1?", "answer": "#### 2"}\n{"question": \n', encoding="utf-8")
    assert f"{bad}:2: not JSON" in _refused("gsm8k", [f"data={tmp_path}"])


def test_a_recipe_does_not_change() -> None:
    """Frozen: what was checked is what is run."""
    recipe = load_recipe("arithmetic")
    with pytest.raises(ValidationError):
        recipe.seed = 3


def test_every_known_key_can_be_written_down(tmp_path: Path) -> None:
    """The keys offered as nearest ones are keys that the models take."""
    recipe = load_recipe("arithmetic").model_dump()
    assert {key for key in setting_keys() if "." not in key} == set(recipe)
    assert {key for key in setting_keys() if key.startswith("grpo.")} == {
        f"grpo.{key}" for key in recipe["grpo"]
    }
    assert load_recipe(_file(tmp_path, yaml.safe_dump(recipe))).model_dump() == recipe


def test_sections_hold_keys_of_trl_only() -> None:
    """Every key of a section is one that TRL's configuration class of this release takes."""
    from dataclasses import fields

    from trl import GRPOConfig, SFTConfig

    assert set(GrpoSection.model_fields) <= {field.name for field in fields(GRPOConfig)}
    assert set(SftSection.model_fields) <= {field.name for field in fields(SFTConfig)}
