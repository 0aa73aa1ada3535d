"""Measure MemGen on problems: accuracy without memory, with memory wherever the budget allows, and with the
trained trigger, and where the trigger fires.

Decoding is greedy. Results are appended to a file batch by batch, so that an evaluation that is started again
repeats no finished batch. Called by recipes, on every rank. Does not decide what is right; the caller does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from grpo_run.runtime.errors import ConfigError
from grpo_run.trainers.memgen.generation import GenerationSettings, Mode, generate
from grpo_run.trainers.memgen.model import NO_DECISION, WEAVE, MemGen

VARIANTS: dict[str, Mode] = {"baseline": "none", "inactive": "always", "trained": "argmax"}
"""The reasoner alone; an inactive trigger, for which memory is woven at the prompt's end and at the first
delimiters; the trained one.
"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one problem was answered.

    Attributes:
        score: what the caller's function returned, between 0 and 1.
        tokens: number of tokens of the completion.
        prompt: whether memory was woven at the prompt's end.
        delimiters: token id of each delimiter of the completion, and whether memory was woven after it.
    """

    score: float
    tokens: int
    prompt: bool
    delimiters: Sequence[Sequence[int]]


def evaluate(
    memgen: MemGen,
    prompts: Sequence[Sequence[int]],
    score: Callable[[int, list[int]], float],
    settings: GenerationSettings,
    *,
    batch_size: int,
    file: Path,
) -> dict[str, list[Outcome]]:
    """Return the outcome of each problem for each of `VARIANTS`. Collective.

    Args:
        prompts: token ids of each problem's prompt.
        score: of a problem, by its number, and the token ids of its completion.
        batch_size: problems of a batch, which the ranks share; a batch is what a kill can repeat.
        file: JSON lines, written by the main process: the settings, and one line for each batch.

    Raises:
        ConfigError: the file has results of other settings.
    """
    state = PartialState()
    header = {"problems": len(prompts), "batch_size": batch_size, **asdict(settings), "temperature": 0}
    # the main process alone reads the file, so that all ranks begin at the same batch
    shared = [_resume(file, header) if state.is_main_process else None]
    finished: Any = broadcast_object_list(shared)[0]
    if isinstance(finished, str):
        raise ConfigError(finished)
    found: dict[str, list[Outcome]] = {}
    for variant, mode in VARIANTS.items():
        found[variant] = []
        for start in range(0, len(prompts), batch_size):
            rows = finished.pop(0) if finished else None
            if rows is None:
                numbers = list(range(start, min(start + batch_size, len(prompts))))
                own = numbers[state.process_index :: state.num_processes]
                # a rank without a problem takes part with one whose outcome is dropped
                done = generate(memgen, [prompts[number] for number in own or numbers[:1]], settings, mode)
                answers = {
                    number: _row(memgen, score(number, tokens), tokens, decisions)
                    for number, tokens, decisions in zip(own, done.tokens, done.decisions, strict=False)
                }
                together = {number: row for part in gather_object([answers]) for number, row in part.items()}
                rows = [together[number] for number in numbers]
                if state.is_main_process:
                    with open(file, "a") as results:
                        results.write(json.dumps({"variant": variant, "start": start, "rows": rows}) + "\n")
            found[variant] += [Outcome(**row) for row in rows]
    return found


def _row(memgen: MemGen, score: float, tokens: list[int], decisions: list[int]) -> dict[str, Any]:
    woven = [decision == WEAVE for decision in (*decisions, NO_DECISION)]
    at = [
        [token, after]  # as JSON returns it
        for token, after in zip(tokens, woven[1:], strict=True)
        if token in memgen.delimiters
    ]
    return {"score": score, "tokens": len(tokens), "prompt": woven[0], "delimiters": at}


def _resume(file: Path, header: dict[str, Any]) -> list[list[dict[str, Any]]] | str:
    """Return the rows of the finished batches, or why the file cannot be used. Cuts off a line that a kill
    left unfinished.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    text = file.read_text() if file.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    first, *batches = [json.loads(line) for line in whole.splitlines()] or [None]
    if first is None:
        whole = json.dumps(header) + "\n"
    elif first != json.loads(json.dumps(header)):
        return f"{str(file)!r} has results of other settings; remove it, or set another output_dir"
    if whole != text:
        file.write_text(whole)
    return [batch["rows"] for batch in batches]


def accuracy(outcomes: Sequence[Outcome]) -> float:
    """Return the mean score."""
    return sum(outcome.score for outcome in outcomes) / len(outcomes)


def firing_by_position(outcomes: Sequence[Outcome]) -> list[float]:
    """Return for the first, second, ... delimiter of a completion how often memory was woven after it."""
    most = max((len(outcome.delimiters) for outcome in outcomes), default=0)
    return [
        _rate(outcome.delimiters[place] for outcome in outcomes if place < len(outcome.delimiters))
        for place in range(most)
    ]


def firing_by_delimiter(outcomes: Sequence[Outcome]) -> dict[int, float]:
    """Return for each delimiter's token id how often memory was woven after it."""
    kinds = sorted({token for outcome in outcomes for token, _ in outcome.delimiters})
    return {
        kind: _rate(one for outcome in outcomes for one in outcome.delimiters if one[0] == kind)
        for kind in kinds
    }


def _rate(delimiters: Any) -> float:
    woven = [bool(fired) for _, fired in delimiters]
    return sum(woven) / len(woven)


def experiment_of(
    outcomes: dict[str, list[Outcome]],
    weaver_logs: Sequence[dict[str, Any]],
    trigger_logs: Sequence[dict[str, Any]],
    text_of: Callable[[int], str],
) -> dict[str, Any]:
    """Return the numbers of an experiment as JSON values: the mean score of each variant, loss and reward by
    step, and how often the trained trigger fires: at the prompt's end, at the first, second, ... delimiter,
    and after each.

    Args:
        outcomes: of the evaluation, by variant.
        weaver_logs: `trainer.state.log_history` of the weaver's training.
        trigger_logs: of the trigger's training.
        text_of: returns the text of a token id.
    """
    trained = outcomes["trained"]
    return {
        "accuracy": {variant: accuracy(found) for variant, found in outcomes.items()},
        "problems": len(trained),
        "weaver_loss": _curve(weaver_logs, "loss"),
        "trigger_loss": _curve(trigger_logs, "loss"),
        "reward": _curve(trigger_logs, "reward"),
        "firing_at_prompt": sum(outcome.prompt for outcome in trained) / len(trained),
        "firing_by_position": firing_by_position(trained),
        "firing_by_delimiter": {text_of(kind): rate for kind, rate in firing_by_delimiter(trained).items()},
    }


def _curve(logs: Sequence[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    return [(int(log["step"]), float(log[key])) for log in logs if key in log]
