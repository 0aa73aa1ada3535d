"""Generate with a frozen reasoner, and weave memory into it at delimiters.

    after prompt and delimiters:   trigger -> decision;  weaver -> K latents, which the reasoner reads next
    for each token:                reasoner -> next token (greedy, with repetition penalty)

The reasoner has one cache for the whole batch, which is extended and never dropped: rows that are woven read
K latents, and the other rows skip K masked slots. Positions count what a row has read. Trigger and weaver run
without a cache, at delimiters only. Called by the trigger's trainer for rollouts and by `evaluation.py`.

All ranks leave the loop together (`consensus.while_any`). If the reasoner's weights are sharded, a forward
pass is a collective of all ranks: ranks then vote before trigger and weaver run, and a rank without a row of
its own runs them on a dummy row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from grpo_run.runtime.rank.rollouts.limits import Deadline, Repetition
from grpo_run.trainers import consensus
from grpo_run.trainers.memgen.model import NO_DECISION, SKIP, WEAVE, MemGen, mask_left, pad_left, positions_of

Mode = Literal["none", "always", "sample", "argmax"]
"""Who decides: `none` generates without memory, `always` weaves wherever the budget allows it, and the
trigger decides by sampling or by its more likely choice."""


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """How completions are generated.

    Attributes:
        max_tokens: the most tokens of a completion; latents do not count.
        repetition_penalty: of transformers' `generate`; divides the logits of tokens that a row has already.
        temperature: of sampled decisions; tokens are greedy.
        end_tokens: token ids that end a completion.
        pad_token: token id of padding.
        repetition_window: tokens after which a completion that repeats itself is ended; 0 for never.
        max_seconds: time after which all completions are ended; None for no limit.
        sharded: whether the weights are sharded over the ranks, so that a forward pass is a collective.
    """

    max_tokens: int
    end_tokens: Sequence[int]
    pad_token: int
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    repetition_window: int = 0
    max_seconds: float | None = None
    sharded: bool = False


@dataclass(frozen=True, kw_only=True)
class Completions:
    """What was generated for each row.

    Attributes:
        tokens: token ids of the completion, with the end token if there is one.
        decisions: for each of these tokens the decision before it, the first at the prompt's end: `SKIP`,
            `WEAVE` or `NO_DECISION`.
    """

    tokens: list[list[int]]
    decisions: list[list[int]]


def generate(
    memgen: MemGen, prompts: Sequence[Sequence[int]], settings: GenerationSettings, mode: Mode
) -> Completions:
    """Generate a completion for each prompt, without dropout. Collective: every rank calls it, with its own
    prompts.

    Args:
        prompts: token ids of each prompt; not empty.
        mode: who decides about memory.
    """
    modes = [(model, model.training) for model in (memgen.weaver, memgen.trigger)]
    try:
        for model, _ in modes:
            model.eval()
        with torch.no_grad():
            return _Batch(memgen, prompts, settings, mode).run()
    finally:
        for model, training in modes:
            model.train(training)


@dataclass(kw_only=True)
class _Row:
    """One completion in progress."""

    read: list[Tensor]
    """Embeddings, [n, D], of what the row has read: tokens and latents, in order."""
    tokens: list[int] = field(default_factory=list)
    decisions: list[int] = field(default_factory=list)
    decision: int = NO_DECISION
    """Before the token that follows."""
    woven: int = 0
    """Augmentations so far, without the prompt's."""


class _Batch:
    """A batch of completions in progress, and the reasoner's cache.

    Attributes of b rows: `_ids` and `_ids_mask`, [b, P + C], have the tokens; `_mask`, [b, S], has the slots
    of the cache, where latents are too; `_logits`, [b, V], follow what each row has read last.
    """

    def __init__(
        self, memgen: MemGen, prompts: Sequence[Sequence[int]], settings: GenerationSettings, mode: Mode
    ) -> None:
        self._memgen, self._settings, self._mode = memgen, settings, mode
        device, count = memgen.reasoner.device, len(prompts)
        rows = [torch.tensor(list(prompt), device=device) for prompt in prompts]
        self._ids, self._ids_mask = pad_left(rows, settings.pad_token), mask_left(rows)
        length = self._ids.shape[1]
        embeddings = memgen.embed(self._ids)
        self._rows = [_Row(read=[embeddings[row, length - len(prompts[row]) :]]) for row in range(count)]
        self._ended = torch.zeros(count, dtype=torch.bool, device=device)
        self._deadline = Deadline(settings.max_seconds) if settings.max_seconds else None
        self._repetition = (
            Repetition(prompt_length=length, window=settings.repetition_window)
            if settings.repetition_window
            else None
        )
        self._most_columns = length + settings.max_tokens
        self._cache: Any = None
        self._mask = self._ids_mask[:, :0]
        self._logits: Tensor | None = None
        self._read(embeddings, self._ids_mask)
        self._penalty = RepetitionPenaltyLogitsProcessor(settings.repetition_penalty)

    def run(self) -> Completions:
        """Generate until no rank has anything left to do."""
        asking = self._mode != "none"
        if asking:
            self._augment(range(len(self._rows)), at_prompt=True)
        for _ in consensus.while_any(self._goes_on):
            if bool(self._ended.all()) and not self._settings.sharded:
                continue
            self._append(self._next_tokens())
            if asking and self._settings.sharded:
                # a rank that stopped to ask by itself would leave the others alone in the trigger's
                # collectives
                asking = consensus.any(any(map(self._may_weave, range(len(self._rows)))))
            if asking:
                self._augment([
                    number for number, row in enumerate(self._rows)
                    if self._may_weave(number) and row.tokens[-1] in self._memgen.delimiters
                ])  # fmt: skip
        return Completions(
            tokens=[row.tokens for row in self._rows], decisions=[row.decisions for row in self._rows]
        )

    def _goes_on(self) -> bool:
        """Whether a row of this rank goes on."""
        if self._ids.shape[1] >= self._most_columns or (
            self._deadline is not None and self._deadline.passed()
        ):
            self._ended[:] = True
        return not bool(self._ended.all())

    def _next_tokens(self) -> Tensor:
        """Return the most likely token of each row, [b]; padding for rows that have ended."""
        assert self._logits is not None, "the prompt is read first"
        # padding is no token that a row has, although it may be the one that ends it
        ids = torch.where(self._ids_mask.bool(), self._ids, self._ids[:, -1:])
        logits = self._penalty(ids, self._logits)
        return torch.where(self._ended, self._settings.pad_token, logits.argmax(-1))

    def _append(self, tokens: Tensor) -> None:
        """Let the reasoner read one token, [b], in each row that goes on."""
        live = ~self._ended
        embeddings = self._memgen.embed(tokens)[:, None]
        self._ids = torch.cat([self._ids, tokens[:, None]], dim=1)
        self._ids_mask = torch.cat([self._ids_mask, live[:, None].long()], dim=1)
        for number, token in enumerate(tokens.tolist()):
            if live[number]:
                row = self._rows[number]
                row.read.append(embeddings[number])
                row.tokens.append(token)
                row.decisions.append(row.decision)
                row.decision = NO_DECISION
        self._read(embeddings, live[:, None].long())
        self._ended |= torch.isin(tokens, torch.tensor(list(self._settings.end_tokens), device=tokens.device))
        if self._repetition is not None:
            self._ended |= self._repetition(self._ids)

    def _may_weave(self, number: int) -> bool:
        return not bool(self._ended[number]) and (
            self._rows[number].woven < self._memgen.settings.augmentations
        )

    def _augment(self, asked: Sequence[int], *, at_prompt: bool = False) -> None:
        """Decide in rows, and weave memory there."""
        if not self._anywhere(bool(asked)):
            return
        for number, decision in zip(asked, self._decide(asked or [0]), strict=False):
            self._rows[number].decision = decision
        woven = [number for number in asked if self._rows[number].decision == WEAVE]
        if self._anywhere(bool(woven)):
            self._weave(woven, at_prompt=at_prompt)

    def _anywhere(self, here: bool) -> bool:
        """Whether this rank has something to do, or any rank, if a forward pass is a collective of all."""
        return consensus.any(here) if self._settings.sharded else here

    def _decide(self, numbers: Sequence[int]) -> list[int]:
        """Return the decisions after the last tokens of rows."""
        if self._mode == "always":
            return [WEAVE] * len(numbers)
        rows = list(numbers)
        logits = self._memgen.decision_logits(self._ids[rows], self._ids_mask[rows])[:, -1].float()
        if self._mode == "argmax":
            return [WEAVE if weave > skip else SKIP for skip, weave in logits.tolist()]
        chances = (logits / self._settings.temperature).softmax(-1)
        decisions: list[int] = torch.multinomial(chances, 1)[:, 0].tolist()
        return decisions

    def _weave(self, numbers: Sequence[int], *, at_prompt: bool) -> None:
        """Weave memory into rows; without rows, take part in the collectives of the ranks that have some."""
        prefixes = [torch.cat(self._rows[number].read) for number in (numbers or [0])]
        latents = self._memgen.weave(prefixes, at_prompt=at_prompt)
        slots = latents.new_zeros(len(self._rows), *latents.shape[1:])
        mask = torch.zeros(slots.shape[:2], dtype=torch.long, device=slots.device)
        for number, vectors in zip(numbers, latents, strict=False):
            row = self._rows[number]
            row.read.append(vectors)
            row.woven += not at_prompt
            slots[number], mask[number] = vectors, 1
        self._read(slots, mask)

    def _read(self, embeddings: Tensor, mask: Tensor) -> None:
        """Let the reasoner read embeddings, [b, n, D], where the mask, [b, n], is 1."""
        self._mask = torch.cat([self._mask, mask], dim=1)
        output = self._memgen.reasoner(
            inputs_embeds=embeddings,
            attention_mask=self._mask,
            position_ids=positions_of(self._mask)[:, -mask.shape[1] :],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache = output.past_key_values
        logits = output.logits[:, -1]
        if self._logits is not None:
            logits = torch.where(mask[:, -1:].bool(), logits, self._logits)
        self._logits = logits
