"""The trainers of MemGen's weaver and trigger. Both are ordinary trainers: of transformers and of TRL.

`WeaverTrainer` trains the weaver with SFT: memory is woven into the demonstrations, at the prompt's end and
at the first delimiters, and the frozen reasoner's cross-entropy on the tokens is the loss. `TriggerTrainer`
trains the trigger with GRPO on its decisions, at the prompt's end and at delimiters: tokens are greedy, so
completions of a group differ by decisions only. Called by recipes, which decide what is trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
import trl
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import GRPOTrainer

from grpo_run.runtime.errors import ConfigError
from grpo_run.trainers.memgen.generation import GenerationSettings, generate
from grpo_run.trainers.memgen.model import NO_DECISION, MemGen, mask_left, pad_left, positions_of
from grpo_run.trainers.memgen.saved import prompt_tokens

IGNORED_LABEL = -100
"""Default `ignore_index` of `torch.nn.functional.cross_entropy`."""


class WeaverTrainer(Trainer):  # type: ignore[misc]
    """Trains the weaver with SFT. Rows of its data set have `prompt_ids` and `completion_ids`, lists of ids.

    Args:
        memgen: whose weaver is trained.
        args: `transformers.TrainingArguments`; columns that the model does not take are kept.
        max_length: tokens of a row; the rest of a completion is left out.
    """

    def __init__(self, memgen: MemGen, args: Any, *, max_length: int, **kwargs: Any) -> None:
        self._memgen, self._max_length = memgen, max_length
        _check(args)
        super().__init__(model=memgen.weaver, args=args, data_collator=list, **kwargs)
        memgen.to(self.accelerator.device)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the cross-entropy of the completions' tokens, with memory woven into them."""
        loss = woven_loss(self._memgen, inputs, self._max_length, weaver=model)
        return (loss, None) if return_outputs else loss


def woven_loss(
    memgen: MemGen, rows: Sequence[dict[str, list[int]]], max_length: int, weaver: Any = None
) -> Tensor:
    """Return the mean cross-entropy of the completions' tokens under the frozen reasoner, teacher-forced.

    Args:
        rows: with `prompt_ids` and `completion_ids`.
        max_length: tokens of a row; the rest is left out.
        weaver: the wrapped weaver during its training.
    """
    device = memgen.reasoner.device
    tokens = [
        torch.tensor([*row["prompt_ids"], *row["completion_ids"]][:max_length], device=device) for row in rows
    ]
    cuts = [cuts_of(row, len(ids), memgen) for row, ids in zip(rows, tokens, strict=True)]
    embeddings = [memgen.embed(ids) for ids in tokens]
    # what each row has read so far, and for each slot the token in it; a latent has none
    read = [part[: cut[0]] for part, cut in zip(embeddings, cuts, strict=True)]
    labels = [torch.full((cut[0],), IGNORED_LABEL, device=device) for cut in cuts]
    for number in range(max(map(len, cuts))):
        woven = [row for row, cut in enumerate(cuts) if number < len(cut)]
        # DDP allows one forward pass of its wrapper for each backward pass, and that prepares all parameters
        wrapped = weaver if number == 0 else None
        latents = memgen.weave([read[row] for row in woven], at_prompt=number == 0, weaver=wrapped)
        for row, vectors in zip(woven, latents, strict=True):
            start, *later = cuts[row][number:]
            part = slice(start, later[0] if later else None)
            read[row] = torch.cat([read[row], vectors, embeddings[row][part]])
            ignored = labels[row].new_full((len(vectors),), IGNORED_LABEL)
            labels[row] = torch.cat([labels[row], ignored, tokens[row][part]])
    mask, targets = mask_left(read), pad_left(labels, IGNORED_LABEL)
    logits = memgen.reasoner(
        inputs_embeds=pad_left(read), attention_mask=mask, position_ids=positions_of(mask), use_cache=False
    ).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), targets[:, 1:].flatten(), ignore_index=IGNORED_LABEL
    )


def cuts_of(row: dict[str, list[int]], length: int, memgen: MemGen) -> list[int]:
    """Return after how many tokens memory is woven: at the prompt's end, and after the first delimiters of
    the completion, the last token excepted, after which nothing is learned.
    """
    start = min(len(row["prompt_ids"]), length)
    ends = [
        start + number + 1
        for number, token in enumerate(row["completion_ids"][: max(0, length - start - 1)])
        if token in memgen.delimiters
    ]
    return [start, *ends[: memgen.settings.augmentations]]


def _check(args: Any) -> None:
    """Refuse what shards weights, and tell DDP that no parameter is unused: its search takes those for unused
    that work outside of `forward`, on what that returns.
    """
    if is_deepspeed_zero3_enabled() or args.fsdp:
        raise ConfigError(
            "MemGen's reasoner, weaver and trigger share their frozen weights, which ZeRO-3 and FSDP would"
            " shard for one of them only; use DDP or ZeRO-2"
        )
    args.ddp_find_unused_parameters = False


LOSS_TYPES = ("bnpo", "grpo")
"""Which divide by the number of decisions; the others of TRL divide by tokens, which are not trained."""
UNUSED = ("top_p", "top_k", "min_p", "generation_kwargs", "use_vllm", "use_liger_kernel")
"""Settings of `GRPOConfig` that a rollout of decisions has no use for."""


def _check_decisions(args: Any, generation: GenerationSettings) -> None:
    """Refuse settings that would be ignored, or would make another loss.

    Raises:
        ConfigError: in one line.
    """
    if args.loss_type not in LOSS_TYPES:
        raise ConfigError(
            f"loss_type={args.loss_type} divides by the number of tokens, but the trigger's loss has"
            f" decisions; use {' or '.join(LOSS_TYPES)}"
        )
    defaults = {one.name: one.default for one in fields(args)}
    given = [name for name in UNUSED if name in defaults and getattr(args, name) != defaults[name]]
    if given:
        raise ConfigError(
            f"MemGen's rollouts do not use {', '.join(given)}: tokens are greedy, and decisions are sampled"
            " with temperature; remove it"
        )
    for name in ("temperature", "repetition_penalty"):
        if getattr(args, name) != getattr(generation, name):
            raise ConfigError(
                f"{name} is {getattr(args, name)} in GRPOConfig and {getattr(generation, name)} in"
                " GenerationSettings; make them equal"
            )


class TriggerTrainer(GRPOTrainer):  # type: ignore[misc]
    """Trains the trigger with GRPO. What TRL calls log-probabilities of tokens are those of decisions.

    A completion's loss has only the positions at which the trigger was asked. The rest of GRPO is TRL's:
    rewards, advantages, clipping, metrics. The loss is near 0 also while the trigger learns: the advantages
    of a group add up to 0, and on the policy that generated them their weights are all 1; the gradient is not
    0.

    Args:
        memgen: whose trigger is trained.
        generation: how rollouts are generated.
        args: `trl.GRPOConfig`. `loss_type` must be "bnpo", as the authors have it, or "grpo", with which each
            completion counts the same, however often its trigger was asked.

    Raises:
        ConfigError: `args` has a setting that would be ignored.
    """

    def __init__(self, memgen: MemGen, generation: GenerationSettings, *, args: Any, **kwargs: Any) -> None:
        self._memgen, self._generation = memgen, generation
        self._decisions: Tensor | None = None
        _check(args)
        _check_decisions(args, generation)
        super().__init__(model=memgen.trigger, args=args, rollout_func=self._rollout, **kwargs)
        memgen.to(self.accelerator.device)

    def _rollout(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        prompt_ids = [prompt_tokens(self.processing_class, prompt) for prompt in prompts]
        found = generate(
            self._memgen, prompt_ids, self._generation, "sample" if self.model.training else "argmax"
        )
        made = [torch.tensor(row, device=self.accelerator.device) for row in found.decisions]
        self._decisions = pad_sequence(made, batch_first=True, padding_value=NO_DECISION)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": found.tokens,
            "logprobs": None,
            "env_mask": [[int(decision != NO_DECISION) for decision in row] for row in found.decisions],
        }

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        return output | {"decisions": self._decisions}

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return GRPO's loss of the decisions."""
        self._decisions = inputs["decisions"]
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, None]:
        """Return log-probability and entropy of the decisions before each token, [B, C], from one forward
        pass.
        """
        if self._decisions is None:
            raise ConfigError(
                f"TRL {trl.__version__} calls rollout_func with vLLM only; MemGen needs a newer release"
            )
        logits = self._memgen.decision_logits(input_ids, attention_mask, trigger=model)
        logs = (logits[:, -logits_to_keep - 1 : -1].float() / self.temperature).log_softmax(-1)
        decisions = self._decisions.clamp(min=0)
        return logs.gather(-1, decisions[..., None])[..., 0], -(logs.exp() * logs).sum(-1), None
