"""Apply the switches of the experiment on RLOO's memory to TRL's trainer: its generation and its head.

Used by `scripts/rloo_memory.py`. TRL tokenizes prompts, pads them, and cuts completions at their end;
this module says which rows reach the model's `generate`, in which parts, and what becomes of the scores.
Every method generates in k parts of one row for each prompt. The data sampler repeats the text of prompts in
all of them, since TRL's rewards need it; it holds no tensors. The full head replaces the forward pass of the
model, not a method of the trainer, so TRL's loss stays as it is.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from support.live_bytes import LiveBytes
from torch.nn.functional import pad
from transformers import TrainerCallback
from trl.trainer.utils import FusedCausalLMOutput, entropy_from_logits, selective_log_softmax

from grpo_run.runtime.files import write_json
from grpo_run.runtime.upstream.trainer_names import SINGLE_TURN
from parts.rloo_switches import Switches


class SwitchedGeneration(TrainerCallback):  # type: ignore[misc]
    """Replaces the generation of a trainer.

    Attributes:
        scores: of the step in progress, as far as the switches keep any: whole ones, or log-probabilities.

    Args:
        trainer: TRL's RLOO trainer.
        switches: of the experiment.
        meter: counts generation as a phase.
        completions: a folder; the completions of a step are read from it if they are there, else written.
            None for neither.
    """

    def __init__(
        self, trainer: Any, switches: Switches, meter: LiveBytes, completions: Path | None = None
    ) -> None:
        self.scores: list[torch.Tensor] = []
        self._trainer, self._switches, self._meter = trainer, switches, meter
        self._completions = completions
        self._generate, self._single_turn = trainer.model.generate, getattr(trainer, SINGLE_TURN)
        trainer.model.generate = self._generate_parts
        setattr(trainer, SINGLE_TURN, self._turn)
        trainer.add_callback(self)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Free what was kept until the end of the step."""
        self.scores.clear()

    def _turn(self, prompt_ids: Sequence[Any], *others: Any) -> list[list[int]]:
        """Generate one rollout; TRL gives each prompt k times."""
        repeats = 1 if self._switches.expansion == "sampler" else self._trainer.num_generations
        generated: list[list[int]] = self._single_turn(prompt_ids[::repeats], *others)
        if self._completions is None:
            return generated
        step = self._trainer.state.global_step
        # how many numbers generation has drawn must not change what is drawn after it
        torch.manual_seed(self._trainer.args.seed + step)
        path = self._completions / f"step-{step}.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, generated, indent=None)
        replayed: list[list[int]] = json.loads(path.read_text())
        return replayed

    def _generate_parts(
        self, *, input_ids: torch.Tensor, attention_mask: torch.Tensor, **others: Any
    ) -> torch.Tensor:
        with self._meter.phase("generate"):
            parts = [self._part(*rows, others) for rows in self._expanded(input_ids, attention_mask)]
            if self._switches.scores == "kept":
                self.scores[:] = [joined(self.scores, 0.0)]
            answers = joined(parts, self._trainer.model.generation_config.pad_token_id)
            if self._switches.expansion == "in_turn":
                return answers.view(len(parts), -1, answers.shape[1]).transpose(0, 1).flatten(0, 1)
            return answers

    def _expanded(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return tokens and mask of each part."""
        count, expansion = self._trainer.num_generations, self._switches.expansion
        if expansion == "in_turn":
            return [(input_ids, attention_mask)] * count
        if expansion == "interleaved":
            input_ids, attention_mask = (
                one.repeat_interleave(count, 0) for one in (input_ids, attention_mask)
            )
        elif expansion == "text":
            tokenizer = self._trainer.processing_class
            texts = tokenizer.batch_decode(input_ids, skip_special_tokens=True)
            repeated = [text for text in texts for _ in range(count)]
            tokens = tokenizer(text=repeated, return_tensors="pt", padding=True).to(input_ids.device)
            input_ids, attention_mask = tokens["input_ids"], tokens["attention_mask"]
        return list(zip(input_ids.chunk(count), attention_mask.chunk(count), strict=True))

    def _part(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, others: dict[str, Any]
    ) -> torch.Tensor:
        rows = {"input_ids": input_ids, "attention_mask": attention_mask, **others}
        if self._switches.scores == "dropped":
            sequences: torch.Tensor = self._generate(**rows)
            return sequences
        rows["generation_config"] = copy.copy(others["generation_config"])
        rows["generation_config"].update(return_dict_in_generate=True, output_scores=True)
        output = self._generate(**rows)
        if self._switches.scores == "kept":
            self.scores.append(torch.stack(output.scores, 1))
        else:
            self.scores.append(reduced(output.scores, output.sequences[:, input_ids.shape[1] :]))
        return output.sequences  # type: ignore[no-any-return]


def reduced(scores: Sequence[torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each token.

    Args:
        scores: for each position, of shape (rows, vocabulary).
        tokens: of shape (rows, positions).
    """
    return torch.stack(
        [
            one.gather(-1, token.unsqueeze(-1)).squeeze(-1) - one.logsumexp(-1)
            for one, token in zip(scores, tokens.unbind(1), strict=True)
        ],
        1,
    )


def joined(parts: Sequence[torch.Tensor], value: float) -> torch.Tensor:
    """Return parts one below the other, padded in their second dimension to the longest."""
    longest = max(part.shape[1] for part in parts)
    return torch.cat(
        [
            pad(part, (*(0, 0) * (part.dim() - 2), 0, longest - part.shape[1]), value=value)
            if part.shape[1] < longest
            else part
            for part in parts
        ]
    )


def use_full_head(model: Any, temperature: float) -> None:
    """Answer the forward passes that ask for the fused head by whole logits.

    Args:
        model: one that a trainer of TRL has given the fused head.
        temperature: that logits are divided by.
    """
    fused = model.forward

    @functools.wraps(fused)  # `generate` looks at the signature
    def forward(*args: Any, fused_lm_head: bool = False, labels: Any = None, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return fused(*args, labels=labels, **kwargs)
        logits = fused(*args, use_cache=False, **kwargs).logits[:, :-1] / temperature
        targets = labels[:, 1:]
        mask = targets != -100
        log_probs = selective_log_softmax(logits, targets.clamp(min=0)).masked_fill(~mask, 0)
        entropy = entropy_from_logits(logits.detach()).masked_fill(~mask, 0)
        return FusedCausalLMOutput(log_probs=log_probs, entropy=entropy, label_mask=mask)

    model.forward = forward
