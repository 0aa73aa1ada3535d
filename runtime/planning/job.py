"""What is planned: sizes and settings of a GRPO, RLOO or SFT job, checked before anything is traced.

Built by `cli.planning` from options, a recipe or a script; changed by `changes.py`. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from grpo_run.runtime.errors import ConfigError

KINDS = ("weights", "gradients", "optimizer", "activations", "logits", "rollout")
"""What an allocation holds. `logits` is what the language-model head allocates: its tiles and their
gradients.
"""
PHASES = ("generate", "score", "forward", "backward", "optimizer")
"""Phases of a step that are predicted, in order."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ALGORITHMS = ("grpo", "rloo", "sft")
TRACED_OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "adafactor", "sgd")
"""Names of transformers' optimizers whose update can be traced without a GPU."""
NAMED_OPTIMIZERS = {
    "adamw_8bit": (2, 1), "adamw_bnb_8bit": (2, 1), "paged_adamw_8bit": (2, 1), "paged_adamw_32bit": (2, 4),
    "lion_8bit": (1, 1), "paged_lion_8bit": (1, 1), "lion_32bit": (1, 4), "paged_lion_32bit": (1, 4),
}  # fmt: skip
"""bitsandbytes' optimizers, whose state is modelled by name: number of states, and bytes of each per
weight.
"""
OPTIMIZERS = (*TRACED_OPTIMIZERS, *NAMED_OPTIMIZERS)
LAYOUTS = ("ddp", "zero2", "zero3", "fsdp")
ATTENTIONS = ("sdpa", "eager")
PROMPT_TOKENS = 256
"""Taken for the longest prompt, whose length no setting of TRL says."""
COMPLETION_TOKENS = 512
"""TRL's default of `max_completion_length`."""
MAX_ROWS = 1 << 16
MAX_TOKENS = 1 << 22
"""Bound of prompt and completion together; above the context of any published model."""
MAX_RANKS = 1 << 16
MAX_LORA_RANK = 1 << 14


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job on one rank.

    Attributes:
        batch: `per_device_train_batch_size`, in rows.
        prompt: length of the longest prompt, in tokens; 0 for SFT, whose rows are not divided.
        completion: `max_completion_length`, or `max_length` of SFT, in tokens.
        weights: data type of the weights.
        autocast: the forward pass runs in bfloat16 (`bf16=True`, TRL's default).
        checkpointing: gradient checkpointing (TRL's default).
        optimizer: name of transformers' `optim`.
        reference: log-probabilities under a reference are computed (`beta` is not 0); a second model is kept
            for it, unless adapters can be switched off.
        rescored: log-probabilities under the old policy are computed (RLOO, `num_iterations` above 1, vLLM,
            or rollouts that last for several optimizer steps).
        accumulation: `gradient_accumulation_steps`; above 1, gradients of earlier micro-batches are alive in
            the forward pass.
        rollout_batches: `steps_per_generation`: micro-batches that one rollout fills.
        ranks: data-parallel ranks.
        layout: how weights, gradients and optimizer state are spread over the ranks.
        attention: implementation in transformers.
        vllm_share: vLLM's share of the GPU if it is colocated, else None.
        vllm_sleeps: vLLM frees its memory outside generation.
        device: `cuda` or `cpu`: whose kernels and allocator are assumed.
        algorithm: one of `ALGORITHMS`: whose trainer runs.
        lora_rank: of adapters that are trained instead of the weights (peft's LoRA); 0 without them.
        lora_targets: names of the modules that get adapters, or `all-linear`; empty for peft's choice.
        lora_dropout: of the adapters' inputs.
        gathers: under ZeRO-3 the whole model is gathered to generate (`ds3_gather_for_generation`, TRL's
            default).
        num_generations: completions per prompt, which a rollout has whole groups of; 0 if it is not known.
    """

    batch: int
    prompt: int
    completion: int
    weights: str = "float32"
    autocast: bool = True
    checkpointing: bool = True
    optimizer: str = "adamw_torch_fused"
    reference: bool = False
    rescored: bool = False
    accumulation: int = 1
    rollout_batches: int = 1
    ranks: int = 1
    layout: str = "ddp"
    attention: str = "sdpa"
    vllm_share: float | None = None
    vllm_sleeps: bool = False
    device: str = "cuda"
    algorithm: str = "grpo"
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    lora_dropout: float = 0.0
    gathers: bool = True
    num_generations: int = 0

    def __post_init__(self) -> None:
        """Check every size.

        Raises:
            ConfigError: a size is impossible, or a name is unknown.
        """
        _check_name("algorithm", self.algorithm, ALGORITHMS)
        _check_range("batch", self.batch, MAX_ROWS)
        if self.generates:
            _check_range("prompt", self.prompt, MAX_TOKENS)
            _check_range("completion", self.completion, MAX_TOKENS)
        else:
            assert (self.prompt, self.scored, self.vllm_share) == (0, False, None)
            _check_range("length", self.completion, MAX_TOKENS, least=2)
        _check_range("ranks", self.ranks, MAX_RANKS)
        _check_range("gradient accumulation", self.accumulation, MAX_ROWS)
        _check_range("steps per generation", self.rollout_batches, MAX_ROWS)
        _check_name("dtype", self.weights, tuple(DTYPE_BYTES))
        _check_name("optimizer", self.optimizer, OPTIMIZERS)
        _check_name("layout", self.layout, LAYOUTS)
        _check_name("attention", self.attention, ATTENTIONS)
        if self.lora_rank != 0:
            _check_range("rank of LoRA", self.lora_rank, MAX_LORA_RANK)
        _check_name("device", self.device, ("cuda", "cpu"))
        if self.vllm_share is not None and not 0 < self.vllm_share < 1:
            raise ConfigError(
                f"vLLM's share of the GPU is {self.vllm_share}, expected a number between 0 and 1"
            )

    @property
    def generates(self) -> bool:
        """Whether rows are generated; those of SFT are given."""
        return self.algorithm != "sft"

    @property
    def transformers_generates(self) -> bool:
        """Whether the model that is trained generates the rows."""
        return self.generates and self.vllm_share is None

    @property
    def deepspeed(self) -> bool:
        """Whether DeepSpeed runs the model: it casts it to bfloat16 for `bf16=True` instead of autocast, and
        keeps fp32 weights.
        """
        return self.layout in ("zero2", "zero3")

    @property
    def as_run(self) -> Job:
        """The job with the types that the forward pass sees."""
        if self.deepspeed and self.autocast and self.weights == "float32":
            return replace(self, weights="bfloat16", autocast=False)
        return self

    @property
    def length(self) -> int:
        """Tokens of a row, padding included."""
        return self.prompt + self.completion

    @property
    def lengths(self) -> str:
        """The length of a row in words: prompt and completion, or the whole of it."""
        return f"{self.prompt} + {self.completion} tokens" if self.generates else f"{self.completion} tokens"

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch, padding included."""
        return self.batch * self.length

    @property
    def scored(self) -> bool:
        """Whether log-probabilities are computed without gradients."""
        return self.reference or self.rescored


def _check_range(name: str, value: int, most: int, least: int = 1) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{name} is {value}, expected {least} to {most}")


def _check_name(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} {value!r} is not known; expected one of {', '.join(known)}")
