"""Traces of a run with other memory plans: from what real trainers tell of themselves to peaks by plan."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from support.memory_cases import GRPO, facts
from support.runs import SCRIPTS

from grpo_run.runtime.continuity.memory.trace_request import TracedJob, TraceRequest
from grpo_run.runtime.continuity.memory_facts import Computation, MemoryFacts
from grpo_run.runtime.continuity.memory_plan import MemoryPlan
from grpo_run.runtime.supervision.memory.prediction import sizes_of
from grpo_run.trainers.memory_plan.facts import collect_facts
from grpo_run.trainers.planning.plans.job_of_run import job_of, refusals
from grpo_run.trainers.planning.plans.worker import answers

START, HALF, QUARTER = (MemoryPlan(micro_batch_divisor=divisor) for divisor in (1, 2, 4))
KNOWN = Computation(
    configuration={"model_type": "qwen2"}, weights="float32", attention="sdpa", optimizer="adamw_torch_fused", device="cuda"
)  # fmt: skip
RUN = facts(computation=KNOWN)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> MemoryFacts:
    """Return the facts of a trainer of TRL, as they are read back from the run directory."""
    import trl

    sys.path.insert(0, str(SCRIPTS))
    try:
        import tiny
    finally:
        sys.path.remove(str(SCRIPTS))
    tokenizer = tiny.tokenizer()
    args = trl.GRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("out")), per_device_train_batch_size=8, num_generations=4, use_cpu=True,
        bf16=False, activation_checkpointing=False, max_completion_length=8, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=tiny.model(len(tokenizer), 11), args=args, processing_class=tokenizer, train_dataset=tiny.prompts(8),
        reward_funcs=[len],
    )  # fmt: skip
    found = collect_facts(trainer, 1, layout="ddp", world_size=1)
    return MemoryFacts.model_validate_json(found.model_dump_json())


def asked(of: MemoryFacts, *plans: MemoryPlan, **options: Any) -> TraceRequest:
    jobs = tuple(TracedJob(plan=plan, sizes=sizes_of(of, plan)) for plan in plans)
    return TraceRequest(facts=of, jobs=jobs, phase="backward", **options)


def test_a_real_trainer_is_traced_until_a_plan_needs_less(real: MemoryFacts) -> None:
    """In this order; a plan after the first that lowers the peak is not traced."""
    assert list(refusals(real)) == []
    found = list(answers(asked(real, START, HALF, QUARTER)))
    assert [(one.plan, one.refusal) for one in found] == [(START, ""), (HALF, "")]
    whole, half = (one.peaks["backward"] for one in found)
    assert half < whole
    (quarter,) = answers(asked(real, QUARTER, below_bytes=half))
    assert quarter.peaks["backward"] < half


def test_a_model_that_its_configuration_does_not_describe_is_not_traced(real: MemoryFacts) -> None:
    changed = real.model_copy(
        update={"model": real.model.model_copy(update={"parameters": 99, "trainable_parameters": 99})}
    )
    (reply,) = answers(asked(changed, START))
    assert "99 parameters" in reply.refusal
    unknown = real.computation.model_copy(update={"configuration": {"model_type": "of-next-year"}})
    (reply,) = answers(asked(real.model_copy(update={"computation": unknown}), START))
    assert "of-next-year" in reply.refusal


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"trainer": "rloo", "trainer_class": "RLOOTrainer"}, "RLOOTrainer is not traced"),
        ({"overridden": ("compute_loss",)}, "its own compute_loss"),
        ({"computation": KNOWN.model_copy(update={"special": ("adapters are not traced",)})}, "adapters"),
        ({"computation": KNOWN.model_copy(update={"configuration": {}})}, "no configuration"),
        ({"computation": KNOWN.model_copy(update={"optimizer": "paged_adamw"})}, "optimizer 'paged_adamw'"),
        ({"computation": KNOWN.model_copy(update={"autocast": "float16"})}, "autocast 'float16'"),
        ({"computation": KNOWN.model_copy(update={"weights": ""})}, "data type ''"),
        ({"layout": "tensor-parallel"}, "layout 'tensor-parallel'"),
        ({"model": GRPO.model.model_copy(update={"trainable_parameters": 1})}, "not all parameters"),
    ],
)
def test_what_cannot_be_traced_is_said(changed: dict[str, Any], words: str) -> None:
    assert list(refusals(RUN)) == []
    assert any(words in reason for reason in refusals(RUN.model_copy(update=changed)))


def test_the_job_of_a_plan_has_the_sizes_of_the_attempt() -> None:
    given = RUN.model_copy(update={"layout": "deepspeed-zero3", "steps_per_generation": 2})
    job = job_of(given, sizes_of(given, MemoryPlan(micro_batch_divisor=4, gradient_checkpointing=True)))
    assert (job.batch, job.prompt + job.completion, job.accumulation > 1) == (2, 768, True)
    assert (job.checkpointing, job.layout, job.ranks, job.rescored) == (True, "zero3", 2, True)
