"""What can be changed when a rank has run out of memory: one class for each change, with everything about it.

`REMEDIES` has them in the order in which they are tried. A remedy proposes the next value of one field of the
memory plan, or says why it does not apply; it says what it does in the terms of the script's settings, and
why the update may not be the same; and it brings that about, in the configuration of a trainer, in the
environment of the ranks or in their generation. A further one is a class, and its place in the table.

`_decision.py` chooses in the supervisor, `_configuration.py` and `rank.py` apply in a rank. Nothing is
predicted: a change that was not enough is followed by the next one, and each can be made only so often.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import pydantic

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.features.memory_plan._remedy import ROW_PHASES, Build, Plan, Refused, Remedy, Situation
from grpo_run.runtime.memory.deepspeed import follow_sizes
from grpo_run.runtime.memory.facts import MemoryFacts, split_differences, split_refusals
from grpo_run.runtime.memory.script_settings import (
    CHECKPOINTING,
    OriginalSettings,
    checkpoints_activations,
    why_not_divided,
)
from grpo_run.watchdog.memory.shortage import MemoryPhase

Count = Annotated[int, pydantic.Field(ge=1)]


def _changed(name: str, before: float | None, after: float | None) -> str:
    old, new = ("none" if value is None else f"{value:g}" for value in (before, after))
    return f"{name} {old} -> {new}"


NO_EFFECT = "the memory plan did not take effect"


class MicroBatch(Remedy):
    """Halve `per_device_train_batch_size` and double the steps that are accumulated."""

    name, field = "micro_batch", "micro_batch_divisor"
    kind, default = Count, 1
    option = "micro-batch"
    help = "micro-batch=N divides per_device_train_batch_size and multiplies gradient_accumulation_steps"
    phases = ROW_PHASES

    def next(self, situation: Situation) -> Any:
        """Return twice the divisor, if the update allows it and the size is even."""
        facts, divisor = situation.facts, self.of(situation.plan)
        if refusals := split_refusals(facts):
            return Refused("; ".join(refusals))
        rows = facts.per_device_train_batch_size
        left, rest = divmod(rows, divisor)
        now = "" if divisor == 1 else f" (divided by {divisor})"
        if left <= 1:
            return Refused(f"a micro-batch is one sample already: per_device_train_batch_size={rows}{now}")
        if rest or left % 2:
            return Refused(f"per_device_train_batch_size={rows}{now} is odd")
        return 2 * divisor

    def said(self, before: Plan, after: Plan, facts: MemoryFacts) -> str:
        """Both settings."""
        divisors = [facts.divisor(self.of(plan)) for plan in (before, after)]
        rows = [facts.per_device_train_batch_size // divisor for divisor in divisors]
        steps = [facts.gradient_accumulation_steps * divisor for divisor in divisors]
        return (
            f"{_changed('per_device_train_batch_size', *rows)},"
            f" {_changed('gradient_accumulation_steps', *steps)}"
        )

    def differences(self, facts: MemoryFacts) -> tuple[str, ...]:
        """Random numbers and the ends of epochs."""
        return split_differences(facts)

    def apply(self, build: Build) -> None:
        """Divide as far as the divisor divides this configuration's size, if its update allows it."""
        made, refusal = build.made, why_not_divided(build.source)
        rows = build.source.per_device_train_batch_size
        divisor = 1 if refusal else math.gcd(rows, self.of(build.plan))
        build.record = replace(build.record, divided_by=divisor, not_divided=refusal)
        made.per_device_train_batch_size, made.gradient_accumulation_steps = build.record.divided
        if isinstance(steps := getattr(build.source, "steps_per_generation", None), int):
            made.steps_per_generation = steps * divisor
        if divisor > 1:
            follow_sizes(made)

    def check(self, plan: Plan, trainer: Any, record: OriginalSettings) -> str | None:
        """Compare the sizes."""
        args, name = trainer.args, type(trainer).__name__
        found = (args.per_device_train_batch_size, args.gradient_accumulation_steps)
        if found != record.divided:
            raise ConfigError(
                f"{NO_EFFECT}: {name} has per_device_train_batch_size={found[0]} and"
                f" gradient_accumulation_steps={found[1]}, not {record.divided[0]} and {record.divided[1]};"
                f" set them before {name} is built, not later"
            )
        asked = f"the memory plan divides the micro-batch by {self.of(plan)}, but"
        if record.not_divided:
            return f"{asked} not that of {name}, whose update would not be the same: {record.not_divided}"
        if record.divided_by != self.of(plan):
            return (
                f"{asked} {name} has per_device_train_batch_size={record.per_device_train_batch_size}:"
                f" divided by {record.divided_by}"
            )
        return None


class GenerationParts(Remedy):
    """Split calls of generation into twice as many parts."""

    name = field = "generation_sub_batches"
    kind, default = Count, 1
    option, help = "sub-batches", "sub-batches=N splits calls of generation"
    phases = frozenset({MemoryPhase.generate})

    def next(self, situation: Situation) -> Any:
        """Return twice the number of parts, up to one row each."""
        return self.after(situation.facts, situation.plan)

    def after(self, facts: MemoryFacts, plan: Plan) -> Any:
        """Return what `next` does, for generation that takes too long, too."""
        if not facts.generates:
            return None
        if facts.generates != "transformers":
            who = {
                "script": "a function of the script generates",
                "continuous_batching": "continuous batching forms its batches itself",
            }
            return Refused(who.get(facts.generates, "vLLM forms its batches itself"))
        rows, parts = _rollout_rows(facts), self.of(plan)
        if 2 * parts > rows:
            return Refused(f"a part is one row already: {rows} rows in {parts} parts")
        return 2 * parts

    def said(self, before: Plan, after: Plan, facts: MemoryFacts) -> str:
        """The number of parts."""
        return f"generation in {self.of(after)} parts"

    def differences(self, facts: MemoryFacts) -> tuple[str, ...]:
        """Random numbers."""
        return () if facts.greedy else ("sampling in smaller batches gives different completions",)


def _rollout_rows(facts: MemoryFacts) -> int:
    """Return how many rows one rank generates in a call."""
    if facts.generation_batch_size is None:
        steps = facts.steps_per_generation or facts.gradient_accumulation_steps
        return facts.per_device_train_batch_size * steps
    return max(1, facts.generation_batch_size // facts.world_size)


FSDP_CHECKPOINTING = "FSDP_ACTIVATION_CHECKPOINTING"
"""Variable of accelerate. FSDP's own checkpointing excludes the setting of transformers."""


class GradientCheckpointing(Remedy):
    """Turn gradient checkpointing on."""

    name = field = "gradient_checkpointing"
    option, help = "checkpointing", "checkpointing turns on gradient checkpointing"
    words = "gradient checkpointing"
    phases = frozenset({MemoryPhase.forward, MemoryPhase.backward})

    def next(self, situation: Situation) -> Any:
        """Return True where it is off, and the script leaves it to the configuration."""
        facts = situation.facts
        if facts.gradient_checkpointing or self.of(situation.plan):
            return Refused("gradient checkpointing is on already")
        if facts.checkpointing_set_later:
            return Refused(
                "gradient checkpointing is also set by an assignment after the configuration was built"
            )
        if not facts.supports_gradient_checkpointing:
            return Refused("the model does not support gradient checkpointing")
        return True

    def apply(self, build: Build) -> None:
        """Set it by both names."""
        for name in () if self._by_fsdp(build.source) else CHECKPOINTING:
            if hasattr(build.made, name):
                setattr(build.made, name, True)

    def check(self, plan: Plan, trainer: Any, record: OriginalSettings) -> str | None:
        """Look whether it is on."""
        if not checkpoints_activations(trainer.args) and not self._by_fsdp(trainer.args):
            name = type(trainer).__name__
            raise ConfigError(
                f"{NO_EFFECT}: {name} has gradient checkpointing turned off; set it before {name} is built,"
                " not later"
            )
        return None

    def _by_fsdp(self, configuration: Any) -> bool:
        options = getattr(configuration, "fsdp_config", None)
        if isinstance(options, dict) and options.get("activation_checkpointing"):
            return True
        return os.environ.get(FSDP_CHECKPOINTING, "").lower() in ("true", "1")


class OptimizerOffload(Remedy):
    """Let DeepSpeed keep the optimizer's state in host memory."""

    name = field = "optimizer_offload"
    option, help = "offload", "offload moves DeepSpeed's optimizer to host memory"
    words = "the optimizer's state in host memory"
    phases = frozenset({MemoryPhase.optimizer})

    def next(self, situation: Situation) -> Any:
        """Return True with ZeRO that does not do so yet."""
        facts = situation.facts
        if facts.optimizer_offload or self.of(situation.plan):
            return Refused("the optimizer's state is in host memory already")
        if not facts.deepspeed or not facts.layout.startswith("deepspeed-zero"):
            return Refused("the optimizer's state can be moved to host memory only with DeepSpeed's ZeRO")
        return True

    def apply(self, build: Build) -> None:
        """Change DeepSpeed's configuration, before an accelerator is made of it; nothing without ZeRO."""
        plugin = getattr(build.made, "deepspeed_plugin", None)
        zero = None if plugin is None else plugin.hf_ds_config.config.get("zero_optimization")
        if plugin is not None and isinstance(zero, dict):
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
            plugin.offload_optimizer_device = "cpu"
            plugin.hf_ds_config.set_stage_and_offload()

    def check(self, plan: Plan, trainer: Any, record: OriginalSettings) -> str | None:
        """Let the optimizer be the one that the run began with, unless DeepSpeed's configuration builds it.

        accelerate would put DeepSpeed's own Adam for the host in its place, which cannot load the state of
        the run's: its groups have other fields. It would also be compiled first, which takes minutes.
        """
        plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
        if plugin is not None and "optimizer" not in plugin.deepspeed_config:
            plugin.deepspeed_config["zero_force_ds_cpu_optimizer"] = False
        return None


class _Setting(Remedy):
    """A setting of the configuration that a trainer is built with.

    Attributes:
        setting: its name.
    """

    setting: ClassVar[str]

    def apply(self, build: Build) -> None:
        """Set it, where the configuration has it."""
        if hasattr(build.source, self.setting):
            others = {**build.record.others, self.setting: getattr(build.source, self.setting)}
            build.record = replace(build.record, others=others)
            setattr(build.made, self.setting, self.of(build.plan))


class VllmSleep(_Setting):
    """Let vLLM free its memory while the model is trained."""

    name = field = "vllm_sleep"
    option = "vllm-sleep"
    words = "vllm_enable_sleep_mode=True"
    setting = "vllm_enable_sleep_mode"
    phases = frozenset(MemoryPhase) - {MemoryPhase.generate, MemoryPhase.load}

    def next(self, situation: Situation) -> Any:
        """Return True where it does not do so yet."""
        if situation.facts.generates != "vllm_colocate":
            return None
        if self.sleeps(situation):
            return Refused("vLLM frees its memory during training already")
        if not situation.facts.vllm_wakes_with_weights:
            return Refused("before TRL 1.10 vLLM has the weights of the model's files after it has slept")
        if situation.own_allocator_setting or SEGMENTS.of(situation.plan):
            return Refused("vLLM may refuse to sleep with expandable segments")
        return True

    @classmethod
    def sleeps(cls, situation: Situation) -> bool:
        """Whether vLLM frees its memory while the model is trained."""
        return situation.facts.vllm_sleep or bool(situation.plan.get(cls.field))


DEFAULT_SHARE = 0.3
"""TRL's default of `vllm_gpu_memory_utilization`."""
LEAST_SHARE = 0.1
"""Of a GPU. A smaller share holds the weights of no model that is worth vLLM."""
MOST_SHARE = 0.9
"""vLLM's own default, for a GPU that it has to itself."""


class VllmShare(_Setting):
    """Lower vLLM's share of a GPU by a third."""

    name, field = "vllm_share", "vllm_gpu_memory_utilization"
    kind, default = Annotated[float, pydantic.Field(gt=0.0, le=1.0)], None
    option, help = "vllm-share", "vllm-share=SHARE"
    setting = "vllm_gpu_memory_utilization"

    def next(self, situation: Situation) -> Any:
        """Return the lower share, unless vLLM sleeps in the phase, or has needed a larger one."""
        facts, plan = situation.facts, situation.plan
        if facts.generates != "vllm_colocate":
            return None
        share, own = self.share(facts, plan), self.share(facts, {})
        if share > own:
            return Refused(f"vLLM needs vllm_gpu_memory_utilization={share:g}")
        lower = round(max(LEAST_SHARE, share * 2 / 3), 2)
        if not lower < share:
            return Refused(f"vllm_gpu_memory_utilization={share:g} is as low as it can be")
        if VllmSleep.sleeps(situation) and situation.phase is not MemoryPhase.generate:
            return Refused("vLLM has given its memory back in this phase already")
        return lower

    def said(self, before: Plan, after: Plan, facts: MemoryFacts) -> str:
        """The setting."""
        return _changed(self.setting, self.share(facts, before), self.share(facts, after))

    def differences(self, facts: MemoryFacts) -> tuple[str, ...]:
        """Random numbers."""
        if facts.greedy:
            return ()
        return (
            "vLLM with another share of memory forms different batches and samples different completions",
        )

    def share(self, facts: MemoryFacts, plan: Plan) -> float:
        """Return vLLM's share of a GPU with a plan."""
        return self.of(plan) or facts.vllm_gpu_memory_utilization or DEFAULT_SHARE


class LargerVllmShare(VllmShare):
    """Raise vLLM's share of a GPU by half, because its cache is too small."""

    name = "larger_vllm_share"

    def is_tried(self, situation: Situation) -> bool:
        """Only then, and nothing else."""
        return situation.cache_too_small

    def next(self, situation: Situation) -> Any:
        """Return the larger share, unless training has needed the memory."""
        facts = situation.facts
        if facts.generates != "vllm_colocate":
            return None
        share = self.share(facts, situation.plan)
        if share < self.share(facts, {}):
            return Refused(f"training left vLLM no more than vllm_gpu_memory_utilization={share:g}")
        larger = round(min(MOST_SHARE, share * 3 / 2), 2)
        if not larger > share:
            return Refused(f"vllm_gpu_memory_utilization={share:g} is as high as it can be")
        return larger


class VllmWakesInParts(VllmSleep):
    """Let vLLM sleep for generation's sake: it gets the weights while its cache is not there yet."""

    phases = frozenset({MemoryPhase.generate})


ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Settings of torch's allocator, before and since torch 2.10, read when a process first uses its GPU. vLLM
inspects the first only, so both are set.
"""


class ExpandableSegments(Remedy):
    """Let the allocator use expandable segments."""

    name = field = "expandable_segments"
    option = "expandable-segments"
    words = "expandable segments"

    def comes_first(self, situation: Situation) -> bool:
        """If memory is fragmented."""
        return situation.fragmented

    def next(self, situation: Situation) -> Any:
        """Return True unless they cannot help, by the figures of the error."""
        figures = situation.shortage.figures
        if situation.own_allocator_setting:
            return Refused("the environment sets expandable_segments itself")
        unallocated, tried, free = figures.unallocated_bytes, figures.tried_bytes, figures.free_bytes
        if unallocated == 0:
            return Refused("nothing is reserved and not allocated")
        if unallocated is not None and tried is not None and free is not None and unallocated < tried - free:
            return Refused("less is reserved and not allocated than was missing")
        if self.of(situation.plan):
            return Refused("expandable segments are on already")
        if situation.facts.generates == "vllm_colocate" and VllmSleep.sleeps(situation):
            return Refused("vLLM may refuse expandable segments while it sleeps")
        return True

    def environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Turn them on, and keep the user's other settings."""
        return {
            name: ",".join(filter(None, (environment.get(name, "").strip(" ,"), f"{self.name}:True")))
            for name in ALLOCATOR_VARIABLES
        }

    @classmethod
    def set_by(cls, environment: Mapping[str, str]) -> bool:
        """Whether the user's environment decides about them."""
        return any(cls.name in environment.get(name, "") for name in ALLOCATOR_VARIABLES)


LEAST_COMPLETION_TOKENS = 16


class ShorterCompletions(_Setting):
    """Halve the longest completion, which changes the experiment: with `--allow-degrade` only."""

    name, field = "shorter_completions", "max_completion_length"
    kind, default = Count, None
    setting = field

    def is_tried(self, situation: Situation) -> bool:
        """If the user allows it, where it helps."""
        return situation.allow_degrade and situation.length_matters

    def next(self, situation: Situation) -> Any:
        """Return half the length."""
        if not situation.facts.generates:
            return None
        tokens = self._tokens(situation.facts, situation.plan)
        if tokens is None:
            return Refused("max_completion_length is not set")
        if tokens // 2 < LEAST_COMPLETION_TOKENS:
            return Refused(f"max_completion_length={tokens} is as short as it can be")
        return tokens // 2

    def said(self, before: Plan, after: Plan, facts: MemoryFacts) -> str:
        """The setting."""
        tokens = [self._tokens(facts, plan) for plan in (before, after)]
        return f"{_changed('max_completion_length', *tokens)} (--allow-degrade)"

    def differences(self, facts: MemoryFacts) -> tuple[str, ...]:
        """The experiment."""
        return ("completions are shorter than the script asks for",)

    def check(self, plan: Plan, trainer: Any, record: OriginalSettings) -> str | None:
        """Compare the length."""
        found, name = getattr(trainer.args, self.setting, None), type(trainer).__name__
        if self.setting in record.others and found != self.of(plan):
            raise ConfigError(
                f"{NO_EFFECT}: {name} has {self.setting}={found}, not {self.of(plan)}; set it before"
                f" {name} is built, not later"
            )
        return None

    def proposed(self, situation: Situation) -> Iterator[str]:
        """Yield what would lower the peak of the phase and changes the experiment, as a phrase with the
        present value.
        """
        facts = situation.facts
        if not situation.length_matters:
            return
        if facts.trainer == "sft":
            if facts.max_length:
                yield f"shorter samples (max_length, now {facts.max_length})"
            return
        shorter = self.next(situation)
        if isinstance(shorter, int):
            values = f"{self.field}={shorter}, now {self._tokens(facts, situation.plan)}"
            yield f"shorter completions ({values}; `--allow-degrade` halves it)"

    def _tokens(self, facts: MemoryFacts, plan: Plan) -> int | None:
        return self.of(plan) or facts.max_completion_length


GENERATION_PARTS, SEGMENTS, COMPLETIONS = GenerationParts(), ExpandableSegments(), ShorterCompletions()
REMEDIES: tuple[Remedy, ...] = (
    MicroBatch(), GENERATION_PARTS, GradientCheckpointing(), OptimizerOffload(), VllmSleep(), VllmShare(),
    VllmWakesInParts(), LargerVllmShare(), SEGMENTS, COMPLETIONS,
)  # fmt: skip
"""In the order in which they are tried: those that keep the update come first."""
BY_FIELD = {remedy.field: remedy for remedy in reversed(REMEDIES)}
"""The first of each field of a plan."""
OPTIONS = {remedy.option: BY_FIELD[remedy.field] for remedy in REMEDIES if remedy.option}
"""By name of `--memory-plan`."""


def read_plan(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan of a JSON object.

    Raises:
        ValueError: a field is not known, or a value is not valid.
    """
    if unknown := values.keys() - BY_FIELD.keys():
        raise ValueError(f"{', '.join(sorted(unknown))}: not in a memory plan")
    checked = {
        field: pydantic.TypeAdapter(BY_FIELD[field].kind).validate_python(value)
        for field, value in values.items()
        if value is not None
    }
    return {field: value for field, value in checked.items() if value != BY_FIELD[field].default}


def text_of(plan: Plan) -> str:
    """Return what is changed, as `--memory-plan` has it, such as `micro-batch=2,checkpointing`."""
    named = {remedy.option or remedy.field: remedy.of(plan) for remedy in differing({}, plan)}
    return ",".join(name if value is True else f"{name}={value}" for name, value in named.items())


def differing(before: Plan, after: Plan) -> list[Remedy]:
    """Return what makes the difference between two plans."""
    firsts = (remedy for remedy in REMEDIES if BY_FIELD[remedy.field] is remedy)
    return [remedy for remedy in firsts if remedy.of(before) != remedy.of(after)]


def in_settings(before: Plan, after: Plan, facts: MemoryFacts) -> str:
    """Return what differs between two plans in the terms of the script's settings."""
    return ", ".join(remedy.said(before, after, facts) for remedy in differing(before, after))
