"""Keeps the first groups of every rollout of a trainer, with the rewards that it uses.

Each rank writes the rows that it has generated, one JSON object per line, to a file of its own with mode 0600
and bounded size. A file that cannot be written ends the keeping, never the training. Changes nothing of the
rollout.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo_run.runtime.features.kept_completions.settings import KeptCompletionsSettings
from grpo_run.runtime.files import append_lines
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.rank.points import RankFeature, RolloutPoints
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.upstream import rollout_names

MAX_FILE_BYTES = 8 * 1024 * 1024
"""At this size a file is begun anew; the old one is kept until the next time."""
MAX_TEXT_CHARACTERS = 16 * 1024


class KeptCompletions:
    """Writer of one rank for one `train()` call.

    Args:
        groups: how many groups of a rollout are kept.
    """

    def __init__(self, trainer: Any, session: Session, train_call: int, groups: int) -> None:
        self._trainer, self._session = trainer, session
        self._train_call, self._groups = train_call, groups
        run = RunDirectory(path=session.config.run_directory)
        self._file = run.completions / f"rank{session.rank}.jsonl"
        self._failed = False

    def keep(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Keep completions with their rewards; those of an evaluation are left out."""
        rewards = original(*args, **kwargs)
        if self._failed or not self._trainer.model.training or len(args) < 4 or not hasattr(rewards, "shape"):
            return rewards  # TRL passes inputs, prompts, completions and their tokens
        _, prompts, completions, tokens = args[:4]
        lines = self._lines(prompts, completions, tokens, rewards)
        if lines:
            try:
                _append(self._file, "".join(lines).encode(errors="backslashreplace"))
            except OSError as error:
                self._failed = True
                self._session.warn_in_journal(f"completions are no longer kept: {error}")
        return rewards

    def _lines(
        self, prompts: Sequence[Any], completions: Sequence[Any], tokens: Sequence[Any], rewards: Any
    ) -> list[str]:
        # rows of all ranks, in the order of the ranks
        first, size = self._session.rank * len(prompts), self._trainer.num_generations
        rows = range(first, min(first + len(prompts), self._groups * size, len(rewards)))
        table = rewards[rows.start : rows.stop].tolist() if rows else []
        names = list(getattr(self._trainer, "reward_func_names", ()))
        end_tokens = rollout_names.end_tokens(self._trainer)
        return [
            json.dumps(
                {
                    "train_call": self._train_call,
                    "step": self._trainer.state.global_step + 1,
                    "attempt": self._session.settings.attempt,
                    "group": row // size,
                    "position": row % size,
                    "prompt": _text(prompts[row - first]),
                    "completion": _text(completions[row - first]),
                    "tokens": len(tokens[row - first]),
                    "ended": "eos" if tokens[row - first] and tokens[row - first][-1] in end_tokens else "",
                    "rewards": {
                        name: value if math.isfinite(value) else None
                        for name, value in zip(names, values, strict=False)
                    },
                }
            )
            + "\n"
            for row, values in zip(rows, table, strict=True)
        ]


def _text(value: Any) -> str:
    """A prompt or completion as text: of a conversation, every message with its role."""
    if isinstance(value, list):
        value = "\n".join(
            f"[{message.get('role')}] {message.get('content')}" if isinstance(message, dict) else str(message)
            for message in value
        )
    text = str(value)
    return text if len(text) <= MAX_TEXT_CHARACTERS else f"{text[:MAX_TEXT_CHARACTERS]}…"


def _append(file: Path, data: bytes) -> None:
    file.parent.mkdir(mode=0o700, exist_ok=True)
    if append_lines(file, data) >= MAX_FILE_BYTES:
        file.replace(file.with_suffix(".old"))


class KeptCompletionsPart(RankFeature):
    """Kept completions at the points of a rank."""

    name = KeptCompletionsSettings.NAME

    def rollouts(self, trainer: Any, session: Session, train_call: int, points: RolloutPoints) -> None:
        """Keep completions of the trainer, if the run keeps some."""
        if groups := session.config.of(KeptCompletionsSettings).groups:
            points.rewards.append(KeptCompletions(trainer, session, train_call, groups).keep)


PART = KeptCompletionsPart()
