"""The three models of MemGen over one set of frozen weights: reasoner, weaver and trigger.

    reasoner   generates; its weights never change
    weaver     reads what the reasoner has read, and writes K latent vectors for it to read next
    trigger    reads the tokens, and says after each one whether the weaver should write

Weaver and trigger are copies of the reasoner with LoRA adapters (peft) that share its frozen tensors, so
that they add little memory. The parts are those of the authors' code (https://github.com/KANABOON1/MemGen,
commit a1b7397); docs/guide/memgen.md lists what differs. Used by `generation.py`, `training.py` and
`saved.py`. Trains nothing itself.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from grpo_run.runtime.errors import ConfigError
from grpo_run.trainers.memory_settings import MemorySettings

QUERIES, READ, WRITE, HEAD = "memory_queries", "memory_read", "memory_write", "decision_head"
"""Names of the modules that weaver and trigger have beyond the reasoner's."""
SKIP, WEAVE, NO_DECISION = 0, 1, -100
"""Decisions of the trigger; no decision where it is not asked. -100 is what torch's losses ignore."""


class MemoryQueries(nn.Module):
    """What the weaver reads after a prefix: learned vectors, normalized and scaled.

    Args:
        counts: number of vectors at the prompt's end, and at a later augmentation.
        width: D, of a vector.
        like: dtype and device.
    """

    def __init__(self, counts: Sequence[int], width: int, **like: Any) -> None:
        super().__init__()
        self.vectors = nn.ParameterList([torch.randn(count, width, **like) for count in counts])
        self.norms = nn.ModuleList([nn.LayerNorm(width, **like) for _ in counts])
        self.scales = nn.ParameterList([torch.ones(1, **like) for _ in counts])

    def forward(self, part: int) -> Tensor:
        """Return the vectors, [K, D], of the prompt's end (0) or of a later augmentation (1)."""
        scaled: Tensor = self.norms[part](self.vectors[part]) * self.scales[part]
        return scaled


class MemGen:
    """A frozen reasoner with its weaver and trigger.

    Args:
        reasoner: any causal language model of transformers; frozen here.
        delimiters: token ids after which memory may be woven.

    Raises:
        ConfigError: the reasoner has been inside a trainer.
    """

    def __init__(self, reasoner: Any, settings: MemorySettings, delimiters: Sequence[int]) -> None:
        if "forward" in vars(reasoner):
            raise ConfigError(
                "the reasoner has been inside a trainer, which has replaced its `forward` by one that copies"
                " of the model would share; load its weights into a new model"
            )
        self.reasoner = reasoner.requires_grad_(False).eval()
        self.settings = settings
        self.delimiters = tuple(sorted(delimiters))
        width = reasoner.get_input_embeddings().embedding_dim
        # a step of 1e-5 would be lost in the rounding of bfloat16
        self._precision = torch.promote_types(reasoner.dtype, torch.float32)
        like = {"dtype": self._precision, "device": reasoner.device}
        queries = MemoryQueries([settings.prompt_latents, settings.latents], width, **like)
        read, write = nn.Linear(width, width, **like), nn.Linear(width, width, **like)
        self.weaver = self._adapted({QUERIES: queries, READ: read, WRITE: write})
        head = nn.Linear(width, 2, **like)
        nn.init.zeros_(head.weight)  # an untrained trigger weaves with probability 0.5 everywhere
        nn.init.zeros_(head.bias)
        self.trigger = self._adapted({HEAD: head})

    def _adapted(self, modules: dict[str, nn.Module]) -> Any:
        """Return a copy of the reasoner with LoRA and trained modules, which shares the frozen tensors."""
        shared = [*self.reasoner.parameters(), *self.reasoner.buffers()]
        model = copy.deepcopy(self.reasoner, {id(tensor): tensor for tensor in shared})
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0  # log-probabilities in training must be those of the rollout
        for name, module in modules.items():
            model.add_module(name, module)
        adapters = LoraConfig(
            r=self.settings.lora_rank,
            lora_alpha=self.settings.lora_alpha,
            lora_dropout=self.settings.lora_dropout,
            target_modules=list(self.settings.lora_targets),
            modules_to_save=list(modules),
            task_type="CAUSAL_LM",
        )
        return get_peft_model(model, adapters)

    def to(self, device: torch.device) -> MemGen:
        """Move all three models to a device."""
        for model in (self.reasoner, self.weaver, self.trigger):
            model.to(device)
        return self

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the reasoner's input embeddings, [..., D], of token ids, [...]."""
        embeddings: Tensor = self.reasoner.get_input_embeddings()(token_ids)
        return embeddings

    def weave(self, prefixes: Sequence[Tensor], *, at_prompt: bool = False, weaver: Any = None) -> Tensor:
        """Return the latents, [b, K, D], that the reasoner reads after each of b prefixes.

        Args:
            prefixes: embeddings, [L_i, D], of what each row has read: tokens, and latents of earlier
                augmentations.
            at_prompt: the prefixes are prompts, which get `prompt_latents` latents.
            weaver: the wrapped weaver during its training; calls go through it.
        """
        own, dtype = self.weaver.get_base_model(), prefixes[0].dtype
        queries = own.get_submodule(QUERIES)(0 if at_prompt else 1).to(dtype)
        read = own.get_submodule(READ)(torch.cat(list(prefixes)).to(self._precision)).to(dtype)
        rows = [torch.cat([prefix, queries]) for prefix in read.split([len(one) for one in prefixes])]
        hidden = last_states(weaver or self.weaver, mask_left(rows), inputs_embeds=pad_left(rows))
        latents: Tensor = own.get_submodule(WRITE)(hidden[:, -len(queries) :].to(self._precision))
        return latents.to(dtype)

    def decision_logits(self, token_ids: Tensor, mask: Tensor, *, trigger: Any = None) -> Tensor:
        """Return the trigger's logits after each token, [b, L, 2], of skipping and of weaving.

        Args:
            token_ids: tokens of prompt and completion, [b, L]; latents are not among them.
            mask: 1 for tokens, 0 for padding, [b, L].
            trigger: the wrapped trigger during its training; calls go through it.
        """
        hidden = last_states(trigger or self.trigger, mask, input_ids=token_ids)
        logits: Tensor = self.trigger.get_base_model().get_submodule(HEAD)(hidden.to(self._precision))
        return logits


def last_states(model: Any, mask: Tensor, **inputs: Tensor) -> Tensor:
    """Return the last hidden states, [b, L, D], of a causal language model without a cache.

    Args:
        mask: 1 for what is read, 0 for padding, [b, L].
        inputs: `input_ids`, [b, L], or `inputs_embeds`, [b, L, D].
    """
    output = model(
        **inputs, attention_mask=mask, position_ids=positions_of(mask), use_cache=False,
        output_hidden_states=True, logits_to_keep=1,
    )  # fmt: skip
    hidden: Tensor = output.hidden_states[-1]
    return hidden


def positions_of(mask: Tensor) -> Tensor:
    """Return the position of each slot among those that are read, [b, L]; masked slots count for nothing."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def pad_left(rows: Sequence[Tensor], value: float = 0) -> Tensor:
    """Return rows, [L_i, ...], as one tensor, [b, L, ...], with padding on the left."""
    return pad_sequence(list(rows), batch_first=True, padding_value=value, padding_side="left")


def mask_left(rows: Sequence[Tensor]) -> Tensor:
    """Return the mask of rows that are padded on the left, [b, L]: 1 for what is read, 0 for padding."""
    return pad_left([torch.ones(len(row), dtype=torch.long, device=row.device) for row in rows])
