"""MemGen: what a batch with a cache generates is what each row generates alone without one; only the weaver
or only the trigger is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_run.trainers.memgen.generation import GenerationSettings, Mode, generate
from grpo_run.trainers.memgen.model import HEAD, NO_DECISION, QUERIES, READ, SKIP, WEAVE, WRITE, MemGen
from grpo_run.trainers.memgen.training import cuts_of, woven_loss
from grpo_run.trainers.memory_settings import MemorySettings
from grpo_run.trainers.recipes.tiny import tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer("abcdefghij,;")
DELIMITERS = TOKENIZER.convert_tokens_to_ids([",", ";", "a", "c", "e"])
END, PAD = TOKENIZER.eos_token_id, TOKENIZER.pad_token_id
SIZES = MemorySettings(prompt_latents=3, latents=2, augmentations=2, lora_rank=4)
PROMPTS = [TOKENIZER(text)["input_ids"] for text in ("abc", "j", "ff,ghij", "b;", "hhhh")]


def settings(**changed: Any) -> GenerationSettings:
    given = {"max_tokens": 12, "end_tokens": [END], "pad_token": PAD, "repetition_penalty": 1.2}
    return GenerationSettings(**{**given, **changed})


@pytest.fixture(scope="module")
def memgen() -> MemGen:
    """Random weights in float64, also where training would begin with zeros: every part has an effect."""
    torch.manual_seed(0)
    made = MemGen(tiny_model(seed=1, tokenizer=TOKENIZER, width=32).double(), SIZES, DELIMITERS)
    for model in (made.weaver.double().eval(), made.trigger.double().eval()):
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.3)
    # about half of the decisions are to weave
    head = made.trigger.get_base_model().get_submodule(HEAD).modules_to_save["default"]
    with torch.no_grad():
        found = generate(made, PROMPTS, settings(), "always").tokens
        differences = []
        for prompt, tokens in zip(PROMPTS, found, strict=True):
            ids = torch.tensor([prompt + tokens])
            skip, weave = made.decision_logits(ids, torch.ones_like(ids))[0, len(prompt) :].unbind(-1)
            differences.append((weave - skip)[torch.isin(ids[0, len(prompt) :], torch.tensor(DELIMITERS))])
        head.bias[1] -= torch.cat(differences).median()
    return made


def last_hidden(model: Any, **inputs: Tensor) -> Tensor:
    """One row without padding, mask, positions or cache."""
    return model(**inputs, use_cache=False, output_hidden_states=True).hidden_states[-1][0]


class Alone:
    """Generates one completion, and computes everything anew for each token."""

    def __init__(self, memgen: MemGen, prompt: Sequence[int], given: GenerationSettings, mode: Mode) -> None:
        self.memgen, self.mode, self.given, self.prompt = memgen, mode, given, list(prompt)
        self.tokens: list[int] = []
        self.decisions: list[int] = []
        self.read = memgen.reasoner.get_input_embeddings()(torch.tensor(self.prompt))

    def weave(self) -> None:
        own = self.memgen.weaver.get_base_model()
        queries = own.get_submodule(QUERIES)(0 if not self.tokens else 1)
        rows = torch.cat([own.get_submodule(READ)(self.read), queries])[None]
        states = last_hidden(self.memgen.weaver, inputs_embeds=rows)
        self.read = torch.cat([self.read, own.get_submodule(WRITE)(states[-len(queries) :])])

    def decide(self) -> int:
        if self.mode == "none":
            return NO_DECISION
        spent = self.decisions[1:].count(WEAVE)
        if self.tokens and (self.tokens[-1] not in DELIMITERS or spent == SIZES.augmentations):
            return NO_DECISION
        if self.mode == "always":
            return WEAVE
        states = last_hidden(self.memgen.trigger, input_ids=torch.tensor([self.prompt + self.tokens]))
        return int(self.memgen.trigger.get_base_model().get_submodule(HEAD)(states[-1]).argmax())

    def run(self) -> tuple[list[int], list[int]]:
        while len(self.tokens) < self.given.max_tokens and self.tokens[-1:] != [END]:
            self.decisions.append(self.decide())
            if self.decisions[-1] == WEAVE:
                self.weave()
            logits = self.memgen.reasoner(inputs_embeds=self.read[None], use_cache=False).logits[0, -1]
            for token in set(self.prompt + self.tokens):
                penalty = self.given.repetition_penalty
                logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
            token = int(logits.argmax())
            self.tokens.append(token)
            embedding = self.memgen.reasoner.get_input_embeddings()(torch.tensor([token]))
            self.read = torch.cat([self.read, embedding])
        return self.tokens, self.decisions


@pytest.mark.parametrize("mode", ["none", "always", "argmax"])
@torch.no_grad()
def test_a_batch_with_a_cache_generates_what_each_row_generates_alone(memgen: MemGen, mode: Mode) -> None:
    """Prompts of other lengths, rows that are woven at other times, and rows that end earlier."""
    given = settings()
    found = generate(memgen, PROMPTS, given, mode)
    alone = [Alone(memgen, prompt, given, mode).run() for prompt in PROMPTS]
    assert found.tokens == [tokens for tokens, _ in alone]
    assert found.decisions == [decisions for _, decisions in alone]
    made = {decision for row in found.decisions for decision in row}
    assert (
        made
        == {"none": {NO_DECISION}, "always": {NO_DECISION, WEAVE}, "argmax": {NO_DECISION, SKIP, WEAVE}}[mode]
    )


def test_a_group_differs_by_decisions_only(memgen: MemGen) -> None:
    """Up to the first decision that differs, the tokens are the same; sampling obeys the seed."""
    torch.manual_seed(3)
    found = generate(memgen, [PROMPTS[2]] * 8, settings(), "sample")
    assert len({tuple(row) for row in found.decisions}) > 1
    by_decisions: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for tokens, decisions in zip(found.tokens, found.decisions, strict=True):
        by_decisions.setdefault(tuple(decisions), set()).add(tuple(tokens))
        assert decisions[1:].count(WEAVE) <= SIZES.augmentations
    assert all(len(tokens) == 1 for tokens in by_decisions.values())
    torch.manual_seed(3)
    assert generate(memgen, [PROMPTS[2]] * 8, settings(), "sample") == found


def test_a_low_temperature_makes_the_likelier_choice(memgen: MemGen) -> None:
    """The temperature is that of decisions."""
    likelier = generate(memgen, PROMPTS, settings(), "argmax")
    assert generate(memgen, PROMPTS, settings(temperature=1e-9), "sample") == likelier
    torch.manual_seed(3)
    assert generate(memgen, PROMPTS, settings(temperature=1e9), "sample") != likelier


def test_rollouts_have_no_dropout(memgen: MemGen) -> None:
    """Also between steps of a trainer, whose mode stays as it was."""
    expected = generate(memgen, PROMPTS, settings(), "argmax")
    memgen.weaver.train(), memgen.trigger.train()
    assert generate(memgen, PROMPTS, settings(), "argmax") == expected
    assert memgen.weaver.training
    assert memgen.trigger.training
    memgen.weaver.eval(), memgen.trigger.eval()


def test_the_latents_are_those_of_the_authors_parts(memgen: MemGen) -> None:
    """Normalized and scaled queries after the projected prefix; a projection of the last states."""
    own = memgen.weaver.get_base_model()
    queries, read, write = (
        own.get_submodule(one).modules_to_save["default"] for one in (QUERIES, READ, WRITE)
    )
    prefix = memgen.embed(torch.tensor(PROMPTS[0]))
    for part, at_prompt in enumerate((True, False)):
        normalized = torch.nn.functional.layer_norm(
            queries.vectors[part], (32,), queries.norms[part].weight, queries.norms[part].bias
        )
        rows = torch.cat([prefix @ read.weight.T + read.bias, normalized * queries.scales[part]])
        states = last_hidden(memgen.weaver, inputs_embeds=rows[None])[-len(normalized) :]
        expected = states @ write.weight.T + write.bias
        torch.testing.assert_close(memgen.weave([prefix], at_prompt=at_prompt)[0], expected)


def test_adapters_are_on_the_queries_and_values_of_attention() -> None:
    """As the authors have them by default."""
    made = MemGen(tiny_model(seed=2, tokenizer=TOKENIZER, width=32), MemorySettings(), DELIMITERS)
    for model in (made.weaver, made.trigger):
        adapters = model.peft_config["default"]
        assert (adapters.r, adapters.lora_alpha, adapters.lora_dropout) == (16, 32, 0.1)
        names = {
            name.split(".lora_")[0].rpartition(".")[2]
            for name, _ in model.named_parameters()
            if ".lora_" in name
        }
        assert names == {"q_proj", "v_proj"}


def test_nothing_is_asked_after_the_budget_and_after_the_end(memgen: MemGen) -> None:
    """The trigger is asked at the prompt's end, and after delimiters while augmentations are left."""
    found = generate(memgen, PROMPTS, settings(), "always")
    for tokens, decisions in zip(found.tokens, found.decisions, strict=True):
        assert decisions[0] == WEAVE
        spent = 0
        for before, decision in zip(tokens, decisions[1:], strict=False):
            assert (decision == WEAVE) == (before in DELIMITERS and spent < SIZES.augmentations)
            spent += decision == WEAVE


def test_a_completion_that_repeats_itself_is_ended(memgen: MemGen) -> None:
    """Without a penalty, greedy decoding of random weights repeats tokens for ever."""
    endless = generate(memgen, PROMPTS, settings(max_tokens=80, repetition_penalty=1.0), "none")
    capped = generate(
        memgen, PROMPTS, settings(max_tokens=80, repetition_penalty=1.0, repetition_window=16), "none"
    )
    assert max(map(len, endless.tokens)) == 80
    for full, short in zip(endless.tokens, capped.tokens, strict=True):
        assert full[: len(short)] == short
    assert min(map(len, capped.tokens)) < 80


ROWS = [
    {"prompt_ids": PROMPTS[0], "completion_ids": [*TOKENIZER("d,efg;ac,b")["input_ids"], END]},
    {"prompt_ids": PROMPTS[2], "completion_ids": [*TOKENIZER("dd")["input_ids"], END]},
]


def test_memory_is_woven_at_the_prompts_end_and_after_the_first_delimiters(memgen: MemGen) -> None:
    assert cuts_of(ROWS[0], 14, memgen) == [3, 5, 6]
    assert cuts_of(ROWS[1], 10, memgen) == [7]
    assert cuts_of(ROWS[0], 5, memgen) == [3]  # nothing is learned after the last token
    assert cuts_of(ROWS[0], 2, memgen) == [2]  # the prompt alone is too long


def test_the_loss_of_a_batch_is_the_mean_over_its_tokens(memgen: MemGen) -> None:
    """Latents and prompts have no loss; rows of other lengths do not disturb one another."""
    counts = [len(row["completion_ids"]) for row in ROWS]
    alone = [woven_loss(memgen, [row], 64).item() for row in ROWS]
    together = woven_loss(memgen, ROWS, 64).item()
    expected = sum(loss * count for loss, count in zip(alone, counts, strict=True)) / sum(counts)
    assert together == pytest.approx(expected, rel=1e-6)
    assert woven_loss(memgen, ROWS, 9).item() != pytest.approx(together)


def test_gradients_reach_only_the_weaver_or_only_the_trigger(memgen: MemGen) -> None:
    """The reasoner's tensors are shared and frozen."""
    models = {"reasoner": memgen.reasoner, "weaver": memgen.weaver, "trigger": memgen.trigger}

    def trained() -> set[str]:
        found = {
            name
            for name, model in models.items()
            for one in model.parameters()
            if one.grad is not None and one.grad.any()
        }
        for model in models.values():
            model.zero_grad(set_to_none=True)
        return found

    woven_loss(memgen, ROWS, 64).backward()
    assert all(one.grad is not None for one in memgen.weaver.parameters() if one.requires_grad)
    assert trained() == {"weaver"}
    ids = torch.tensor([PROMPTS[0]])
    memgen.decision_logits(ids, torch.ones_like(ids)).log_softmax(-1)[..., 1].sum().backward()
    assert all(one.grad is not None for one in memgen.trigger.parameters() if one.requires_grad)
    assert trained() == {"trigger"}


def test_the_frozen_tensors_exist_once(memgen: MemGen) -> None:
    frozen = {id(one) for one in memgen.reasoner.parameters()}
    for model in (memgen.weaver, memgen.trigger):
        own = [one for one in model.parameters() if one.requires_grad]
        assert frozen <= {id(one) for one in model.parameters()}
        assert not frozen & {id(one) for one in own}


def test_an_untrained_trigger_weaves_with_probability_one_half() -> None:
    fresh = MemGen(tiny_model(seed=2, tokenizer=TOKENIZER, width=32), SIZES, DELIMITERS)
    ids = torch.tensor([PROMPTS[2]])
    assert not fresh.decision_logits(ids, torch.ones_like(ids)).any()
