"""Traces of a run with other memory plans: from what real trainers tell of themselves to peaks by plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.memory_cases import facts
from support.tiny_trainers import tiny_trainer

from grpo_run.runtime.memory.facts import Computation, MemoryFacts
from grpo_run.runtime.memory.files import TraceRequest
from grpo_run.runtime.memory.plan import MemoryPlan
from grpo_run.runtime.planning.plan_worker import answers, job_of, refusals
from grpo_run.runtime.rank.memory_plan.facts import collect_facts

START, HALF, QUARTER = (MemoryPlan(micro_batch_divisor=divisor) for divisor in (1, 2, 4))
KNOWN = Computation(
    configuration={"model_type": "qwen2"}, weights="float32", attention="sdpa", optimizer="adamw_torch_fused",
    device="cuda"
)  # fmt: skip
RUN = facts(computation=KNOWN)


def _facts_of(kind: str, folder: Path, peft: dict[str, Any] | None = None, **settings: Any) -> MemoryFacts:
    """Return the facts of a trainer of TRL, as they are read back from the run directory."""
    from peft import LoraConfig

    rows = {"max_length": 32} if kind == "SFT" else {"max_completion_length": 4, "beta": 0.0}
    adapters = None if peft is None else LoraConfig(task_type="CAUSAL_LM", **peft)
    trainer = tiny_trainer(kind, folder, peft=adapters, **{**rows, **settings})
    found = collect_facts(trainer, layout="ddp", world_size=1)
    return MemoryFacts.model_validate_json(found.model_dump_json())


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> MemoryFacts:
    """Return the facts of a trainer of GRPO."""
    return _facts_of("GRPO", tmp_path_factory.mktemp("out"))


def asked(of: MemoryFacts, *plans: MemoryPlan, **options: Any) -> TraceRequest:
    return TraceRequest(facts=of, plans=plans, phase="backward", **options)


def test_a_real_trainer_is_traced_until_a_plan_needs_less(real: MemoryFacts) -> None:
    """In this order; a plan after the first that lowers the peak is not traced."""
    assert list(refusals(real)) == []
    found = list(answers(asked(real, START, HALF, QUARTER)))
    assert [(one.plan, one.refusal) for one in found] == [(START, ""), (HALF, "")]
    whole, half = (one.peaks["backward"] for one in found)
    assert half < whole
    (quarter,) = answers(asked(real, QUARTER, below_bytes=half))
    assert quarter.peaks["backward"] < half


@pytest.mark.parametrize(
    ("kind", "peft", "expected"),
    [
        pytest.param(
            "RLOO",
            None,
            {"algorithm": "rloo", "rescored": True, "reference": False, "lora_rank": 0},
            marks=pytest.mark.full,
        ),
        ("SFT", None, {"algorithm": "sft", "rescored": False, "prompt": 0, "completion": 32}),
        (
            "GRPO",
            {"r": 2, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"]},
            {"reference": True, "lora_rank": 2, "lora_targets": ("q_proj", "v_proj"), "lora_dropout": 0.1},
        ),
    ],
    ids=["rloo", "sft", "lora"],
)
def test_other_trainers_and_adapters_are_traced(
    kind: str, peft: dict[str, Any] | None, expected: dict[str, Any], tmp_path: Path
) -> None:
    """As the job that they are; a half of the micro-batch needs less. Adapters score a reference without a
    second model.
    """
    found = _facts_of(kind, tmp_path, peft, **({"beta": 0.1 if peft else 0.0} if kind != "SFT" else {}))
    assert list(refusals(found)) == []
    job = job_of(found, START)
    assert {name: getattr(job, name) for name in expected} == expected
    replies = list(answers(asked(found, START, HALF)))
    assert [(one.plan, one.refusal) for one in replies] == [(START, ""), (HALF, "")]
    assert replies[1].peaks["backward"] < replies[0].peaks["backward"]


@pytest.mark.parametrize(
    ("peft", "words"),
    [
        ({"r": 2, "use_dora": True}, "use_dora"),
        ({"r": 2, "target_modules": ".*q_proj"}, "a pattern"),
        ({"r": 2, "bias": "all"}, "bias"),
    ],
)
def test_adapters_other_than_plain_ones_are_refused(peft: dict[str, Any], words: str, tmp_path: Path) -> None:
    """Their sizes would be those of another job."""
    assert any(words in reason for reason in refusals(_facts_of("GRPO", tmp_path, peft)))


def test_adapters_that_are_not_all_that_is_trained_are_not_traced(tmp_path: Path) -> None:
    """A script may train more than it says to peft."""
    found = _facts_of("GRPO", tmp_path, {"r": 2, "target_modules": ["q_proj"]})
    more = found.model_copy(update={"trainable_parameters": 2 * found.trainable_parameters})
    (reply,) = answers(asked(more, START))
    assert "parameters" in reply.refusal


def test_packed_rows_are_not_traced(tmp_path: Path) -> None:
    """They are joined to one row, whose kernels a trace for padded rows does not show."""
    found = _facts_of("SFT", tmp_path, packing=True, packing_strategy="wrapped")
    assert any("without padding" in reason for reason in refusals(found))


def test_a_model_that_its_configuration_does_not_describe_is_not_traced(real: MemoryFacts) -> None:
    changed = real.model_copy(update={"parameters": 99, "trainable_parameters": 99})
    (reply,) = answers(asked(changed, START))
    assert "99 parameters" in reply.refusal
    unknown = real.computation.model_copy(update={"configuration": {"model_type": "of-next-year"}})
    (reply,) = answers(asked(real.model_copy(update={"computation": unknown}), START))
    assert "of-next-year" in reply.refusal


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"trainer": "transformers", "trainer_class": "Trainer"}, "Trainer is not traced"),
        ({"trainer": "sft", "max_length": None}, "no longest length"),
        ({"overridden": ("compute_loss",)}, "its own compute_loss"),
        ({"computation": KNOWN.model_copy(update={"special": ("adapters are not traced",)})}, "adapters"),
        ({"computation": KNOWN.model_copy(update={"configuration": {}})}, "no configuration"),
        ({"computation": KNOWN.model_copy(update={"optimizer": "paged_adamw"})}, "optimizer 'paged_adamw'"),
        ({"computation": KNOWN.model_copy(update={"autocast": "float16"})}, "autocast 'float16'"),
        ({"computation": KNOWN.model_copy(update={"weights": ""})}, "data type ''"),
        ({"layout": "tensor-parallel"}, "layout 'tensor-parallel'"),
        ({"trainable_parameters": 1}, "not all parameters"),
    ],
)
def test_what_cannot_be_traced_is_said(changed: dict[str, Any], words: str) -> None:
    assert list(refusals(RUN)) == []
    assert any(words in reason for reason in refusals(RUN.model_copy(update=changed)))


def test_the_job_of_a_plan_has_the_sizes_of_the_attempt() -> None:
    given = RUN.model_copy(update={"layout": "deepspeed-zero3", "steps_per_generation": 2})
    job = job_of(given, MemoryPlan(micro_batch_divisor=4, gradient_checkpointing=True))
    assert (job.batch, job.prompt + job.completion, job.accumulation > 1) == (2, 768, True)
    assert (job.checkpointing, job.layout, job.ranks, job.rescored) == (True, "zero3", 2, True)
