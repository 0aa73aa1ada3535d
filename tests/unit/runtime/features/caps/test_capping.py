"""Caps on TRL's own trainers: what they make of a completion that a cap has ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from support.planted import cycle, planted
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.features.caps._capping import Capping
from grpo_run.runtime.features.caps._configuration import CapSettings
from grpo_run.runtime.features.caps._rollout import CappedRollout, DeadlineDecision
from grpo_run.runtime.rank.rollouts import generate_calls
from grpo_run.trainers.caps import apply

PAD, EOS, LOOP, END, LONG = 0, 1, 2, 10, 20
"""The last three are prompts: a loop of two tokens, an end after five, and no end before the maximum of
40.
"""
MAX_LENGTH = 40
generate_calls.install()  # as `grpo-run launch` does before a script can keep the method


def word(number: int) -> str:
    """Return the text of a token."""
    return f"<{number}>"


def tokenizer(pad: int) -> PreTrainedTokenizerFast:
    """Return one with a word for each number."""
    backend = Tokenizer(WordLevel({word(number): number for number in range(200)}))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=word(pad), eos_token=word(EOS), padding_side="left"
    )


def model(pad: int) -> Any:
    """Return the model of the three prompts."""
    successors = cycle([LOOP, LOOP + 1], 200)
    for token in (*range(END, END + 4), *range(LONG, 199)):
        successors[token] = token + 1
    successors[END + 4] = EOS
    return planted(successors, pad=pad, eos=EOS)


Make = Callable[..., Any]


@pytest.fixture(params=["grpo", "rloo"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """A trainer with groups of two; its reward is the length."""

    def trainer(pad: int = PAD, **settings: Any) -> Any:
        config_class, trainer_class = (
            (GRPOConfig, GRPOTrainer) if request.param == "grpo" else (RLOOConfig, RLOOTrainer)
        )
        config = config_class(
            output_dir=str(tmp_path), per_device_train_batch_size=6, num_generations=2, report_to=[],
            use_cpu=True,
            bf16=False, beta=0.0, max_completion_length=MAX_LENGTH, **settings,
        )  # fmt: skip
        made = trainer_class(
            model=model(pad),
            reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
            args=config,
            train_dataset=Dataset.from_dict({"prompt": [word(LOOP)] * 8}),
            processing_class=tokenizer(pad),
        )
        made.model.train()
        return made

    return trainer


def rollout(trainer: Any, settings: CapSettings, **keywords: Any) -> tuple[dict[str, Any], Capping]:
    """Let the trainer generate and score two completions of each prompt."""
    inputs = [{"prompt": word(prompt)} for prompt in (LOOP, LOOP, END, END, LONG, LONG)]
    capping = Capping(trainer, settings, **keywords)
    with capping.applied():
        return trainer._generate_and_score_completions(inputs), capping


@pytest.mark.parametrize("pad", [PAD, EOS])
def test_ids_mask_and_normaliser_are_those_of_the_cut_completion(make: Make, pad: int) -> None:
    """Also where padding is the end-of-sequence token: the completion does not end with one."""
    found, capping = rollout(make(pad), CapSettings(repetition=16))
    lengths = found["completion_mask"].sum(1).tolist()
    assert [reason.value for reason in capping.end_reasons() or ()] == [
        "repetition", "repetition", "eos", "eos", "length", "length",
    ]  # fmt: skip
    looped = lengths[0]
    assert 16 <= looped <= 3 * 2 + 16
    assert lengths == [looped, looped, 5, 5, MAX_LENGTH, MAX_LENGTH]
    ids = found["completion_ids"].tolist()
    assert ids[0] == [LOOP + 1, LOOP] * (looped // 2) + [pad] * (MAX_LENGTH - looped)
    assert ids[2][:5] == [*range(END + 1, END + 5), EOS]
    if "num_items_in_batch" in found:
        assert found["num_items_in_batch"] == sum(lengths)


def test_a_deadline_cuts_what_has_not_ended(make: Make) -> None:
    """After the third token; the completions that end themselves later are cut, too."""
    reports: list[CappedRollout] = []
    seconds = iter(range(100))
    found, capping = rollout(
        make(), CapSettings(max_time=4.0), clock=lambda: float(next(seconds)), report=reports.append
    )
    lengths = found["completion_mask"].sum(1).tolist()
    assert len(set(lengths)) == 1
    assert lengths[0] == 4
    assert [reason.value for reason in capping.end_reasons() or ()] == ["deadline"] * 6
    assert [(one.steps, one.timed_out_after) for one in reports] == [(4, 4)]


def test_without_a_cut_everything_is_as_without_caps(make: Make) -> None:
    """Every tensor of the rollout is equal."""
    plain, none = rollout(make(), CapSettings())
    capped, capping = rollout(make(), CapSettings(repetition=60, max_time=1000.0))
    assert none.end_reasons() is None
    assert [reason.value for reason in capping.end_reasons() or ()] == ["length"] * 2 + ["eos"] * 2 + [
        "length"
    ] * 2
    assert plain.keys() == capped.keys()
    for name, value in plain.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(capped[name])), name


def test_nothing_of_the_caps_is_left_on_the_trainer(make: Make) -> None:
    """Its methods are its own again."""
    trainer = make()
    before = dict(vars(trainer))
    with Capping(trainer, CapSettings(repetition=16)).applied():
        assert "_generate" in vars(trainer)
    assert vars(trainer).keys() == before.keys()


def test_another_model_that_generates_meanwhile_is_not_capped(make: Make) -> None:
    """A judge that a reward or a tool uses."""
    trainer, judge = make(), model(PAD)
    seen: list[int] = []

    def judged(completions: list[str], **_: Any) -> list[float]:
        inputs = torch.tensor([[LOOP]])
        seen.append(judge.generate(input_ids=inputs, max_new_tokens=100, do_sample=False).shape[1])
        return [0.0] * len(completions)

    judged.__name__ = "judged"
    trainer.reward_funcs[:] = [judged]
    rollout(trainer, CapSettings(repetition=16))
    assert seen == [101]


def test_a_model_that_generates_in_its_own_way_is_an_error(make: Make) -> None:
    """The cap would be without effect, and its user would not know."""
    trainer = make()
    trainer.model.generate = lambda input_ids, **_: torch.cat([input_ids, input_ids], dim=1)
    with pytest.raises(ConfigError, match="did not take effect"):
        rollout(trainer, CapSettings(repetition=16))


def test_a_model_that_generates_in_several_calls_is_an_error(make: Make) -> None:
    """Which completion a row of the second call belongs to is not known."""
    trainer = make()
    original = trainer.model.generate

    def twice(input_ids: torch.Tensor, **keywords: Any) -> torch.Tensor:
        original(input_ids=input_ids, **keywords)
        return original(input_ids=input_ids, **keywords)

    trainer.model.generate = twice
    with pytest.raises(ConfigError, match="several times"):
        rollout(trainer, CapSettings(repetition=16))


def test_criteria_of_the_script_act_beside_the_caps(make: Make) -> None:
    """A subclass may pass its own."""
    from transformers import MaxLengthCriteria, StoppingCriteriaList

    trainer = make()
    original = trainer.model.generate
    trainer.model.generate = lambda **keywords: original(
        stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(max_length=31)]), **keywords
    )
    found, _ = rollout(trainer, CapSettings(repetition=16))
    lengths = found["completion_mask"].sum(1).tolist()
    assert 16 <= lengths[0] <= 22
    assert lengths[2:] == [5, 5, 30, 30]


def test_a_script_caps_its_trainer_itself(make: Make) -> None:
    """Without `grpo-run launch`."""
    trainer = make()
    apply(trainer, repetition=16)
    inputs = [{"prompt": word(prompt)} for prompt in (LOOP, LOOP, END, END, LONG, LONG)]
    found = trainer._generate_and_score_completions(inputs)
    with pytest.raises(ConfigError, match="twice"):
        apply(trainer, max_time=3.0)
    assert 16 <= found["completion_mask"].sum(1).tolist()[0] <= 22


def test_a_capped_turn_calls_no_tools(make: Make) -> None:
    """The text that a cap has cut is not what the model meant to say."""
    trainer = make()
    if not isinstance(trainer, GRPOTrainer):
        pytest.skip("RLOO has no tools")
    import trl.trainer.grpo_trainer as module

    trainer.tools = [lambda: None]
    call = {"role": "assistant", "tool_calls": [{"type": "function"}]}
    messages: list[dict[str, Any]] = []

    def generated(original: Any) -> Any:
        def turn(prompts: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(prompts, *args, **kwargs)
            messages.extend(module.parse_response(None, ids, prefix=[]) for ids in result[0])
            return result

        return turn

    original_parse, module.parse_response = module.parse_response, lambda *args, **kwargs: dict(call)
    try:
        capping = Capping(trainer, CapSettings(repetition=16))
        trainer._tool_call_loop = lambda prompts, prompt_ids, ids, completions, logprobs, *_: (
            [[1] * len(one) for one in ids], completions, ids, logprobs, 0, 0, [[] for _ in ids],
        )  # fmt: skip
        with capping.applied():
            trainer._generate_single_turn = generated(trainer._generate_single_turn)
            trainer._generate([word(prompt) for prompt in (LOOP, END, LONG)])
    finally:
        module.parse_response = original_parse
    assert ["tool_calls" in message for message in messages] == [False, True, True]


def test_a_trainer_that_does_not_generate_is_left_alone() -> None:
    """An SFT trainer in the same script."""
    trainer = SimpleNamespace(args=None)
    with Capping(trainer, CapSettings(repetition=16)).applied():
        assert vars(trainer) == {"args": None}


@pytest.mark.parametrize(
    "settings", [CapSettings(), CapSettings(repetition=16)], ids=["uncapped", "repetition"]
)
def test_greedy_rollouts_in_parts_are_those_of_one_call(make: Make, settings: CapSettings) -> None:
    """Also where a cap ends completions of one part: the model is planted, so it draws nothing that
    matters.
    """
    trainer = make()
    whole, capping = rollout(trainer, settings)
    reasons = capping.end_reasons()
    for count in (2, 4, 50):
        with generate_calls.in_parts(count):
            found, capping = rollout(trainer, settings)
        assert capping.end_reasons() == reasons, count
        assert found.keys() == whole.keys()
        for name in ("completion_ids", "completion_mask", "prompt_ids", "advantages"):
            assert torch.equal(found[name], whole[name]), (count, name)


def test_each_part_is_one_call_of_fewer_rows(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    trainer = make()
    prepare = type(trainer.model).prepare_inputs_for_generation

    def counted(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        rows.append(len(input_ids))
        return prepare(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(type(trainer.model), "prepare_inputs_for_generation", counted)
    with generate_calls.in_parts(4):
        rollout(trainer, CapSettings())
    assert [rows[0], rows[-1], max(rows)] == [2, 1, 2]


def test_a_deadline_counts_the_tokens_of_all_parts(make: Make) -> None:
    """It passes in the second part; repeated, it ends after the same token."""
    reports: list[CappedRollout] = []
    trainer, seconds = make(), iter(range(1000))
    with generate_calls.in_parts(2):
        found, _ = rollout(
            trainer, CapSettings(max_time=50.0), clock=lambda: float(next(seconds)), report=reports.append
        )
        (first,) = reports
        decided = DeadlineDecision(steps=first.steps, timed_out_after=first.timed_out_after)
        again, _ = rollout(trainer, CapSettings(max_time=50.0), clock=lambda: 0.0, decided=lambda: decided)
    assert MAX_LENGTH < first.timed_out_after == first.steps
    assert torch.equal(found["completion_ids"], again["completion_ids"])
    assert torch.equal(found["completion_mask"], again["completion_mask"])
