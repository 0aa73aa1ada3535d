"""The order in which a trainer reads its data: shuffled, as given, or sorted by length.

Said at the start, because ranks take fixed parts of each batch: in a data set that is sorted, the same rank always has the
longest completions, and all others wait for it. Called by `train_call.py`. Changes nothing.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from grpo_run.trainers.upstream import trainer_names
from grpo_run.watchdog.progress.late_ranks import DataOrder

SAMPLES = 256
"""Rows that are looked at, evenly spread over the data set."""
SORTED_SHARE = 0.9
"""Share of neighbours in one order from which a data set counts as sorted; of random ones, half are."""
TEXT_COLUMNS = ("prompt", "text", "messages", "question", "input_ids")


def data_order(trainer: Any) -> DataOrder:
    """Return the order of the training data; unknown for trainers that do not say whether they shuffle.

    Of trainers that generate, `shuffle_dataset` is the sampler's order. SFT has a setting of that name, too: it shuffles once in
    advance, and the sampler of `transformers.Trainer` is random in any case.
    """
    generates = hasattr(trainer, trainer_names.GENERATE)
    shuffles = getattr(trainer.args, "shuffle_dataset", None) if generates else None
    if shuffles is None:
        return DataOrder.unknown
    if shuffles:
        return DataOrder.shuffled
    return (
        DataOrder.sorted_by_length if _is_sorted(getattr(trainer, "train_dataset", None)) else DataOrder.kept
    )


def warning(order: DataOrder) -> str | None:
    """Return the warning about an order; None for one that is harmless or unknown."""
    if order not in (DataOrder.kept, DataOrder.sorted_by_length):
        return None
    how = " and the data set is sorted by length" if order is DataOrder.sorted_by_length else ""
    return (
        f"shuffle_dataset=False{how}: each rank takes a fixed part of every batch, so one rank may always have the longest"
        " completions while the others wait; shuffle the data set unless its order matters"
    )


def _is_sorted(dataset: Any) -> bool:
    """Whether the lengths of the first text column rise or fall from row to row."""
    columns = getattr(dataset, "column_names", None)
    column = next((name for name in TEXT_COLUMNS if name in (columns or ())), None)
    # only a data set of Hugging Face can be read without a transform, which may draw random numbers
    if column is None or not hasattr(dataset, "with_format") or not hasattr(dataset, "__len__"):
        return False
    step = max(1, len(dataset) // SAMPLES)
    rows = dataset.with_format(None).select(range(0, len(dataset), step))
    lengths = [len(str(value)) for value in rows[column]]
    rises = sum(later > earlier for earlier, later in pairwise(lengths))
    falls = sum(later < earlier for earlier, later in pairwise(lengths))
    return max(rises, falls) >= SORTED_SHARE * (rises + falls) > 0 and rises + falls >= len(lengths) // 2
