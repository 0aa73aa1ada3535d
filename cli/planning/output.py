"""A prediction as text of 80 columns, and as JSON. Called by `plan.py`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from grpo_run.cli.text.table import print_table
from grpo_run.trainers.planning.changes import Outcome
from grpo_run.trainers.planning.closed_form import SUSPICIOUS
from grpo_run.trainers.planning.prediction import PhaseMemory, Prediction, Predictor
from grpo_run.trainers.planning.timeline import KINDS

WIDTH = 80
_GIB = 1 << 30
SHORT = {
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "activ",
    "rollout": "rollout",
}
NOT_COMPARED = (
    "Compared with real runs on a CPU only (docs/planning.md). Figures for a GPU have never been compared with one: kernels,"
    " context, workspaces and NCCL are modelled by name."
)


def print_plan(
    model: str,
    predictor: Predictor,
    prediction: Prediction,
    changes: Sequence[Outcome],
    batch: int | None,
    completion: int | None,
) -> None:
    """Print a prediction: ledger, verdict, what fits, and changes."""
    job = prediction.job
    _say(
        f"{model}: {predictor.shape.parameters / 1e6:,.1f} M parameters, {predictor.shape.layers} layers; micro-batch of {job.batch}"
        f" rows, {job.prompt} + {job.completion} tokens, {job.weights} weights{', bf16 autocast' if job.autocast else ''},"
        f" {'with' if job.checkpointing else 'without'} gradient checkpointing, {job.optimizer}"
    )
    print("\nPeak of each phase on one rank, GiB:\n")
    kinds = [
        kind
        for kind in KINDS
        if any(_of(memory, kind) >= _GIB / 200 for memory in prediction.phases.values())
    ]
    rows = [["phase", *(SHORT.get(kind, kind) for kind in kinds), "added", "allocated", "device"]]
    for phase, memory in prediction.phases.items():
        added = memory.allocated_bytes - sum(memory.traced.values())
        mark = "*" if phase == prediction.binding else ""
        rows.append(
            [
                phase + mark,
                *(_gib(_of(memory, kind)) for kind in kinds),
                _gib(added),
                _gib(memory.allocated_bytes),
                f"{_gib(memory.low_bytes)}-{_gib(memory.high_bytes)}",
            ]
        )
    print_table(rows)
    print()
    for sentence in sentences(predictor, prediction, batch, completion):
        _say(sentence)
    if prediction.terms:
        print("\nAdded to what was traced, GiB:")
        for term in prediction.terms:
            _say(f"{term.name}: {_range(term.low_bytes, term.high_bytes)} ({term.provenance})")
    if changes:
        print("\nChanges, each predicted again (GiB with it, and saved):")
        for one in changes:
            _say(_change_text(one), hanging="      ")
    if job.device == "cuda":
        print()
        _say(NOT_COMPARED)


def sentences(
    predictor: Predictor, prediction: Prediction, batch: int | None, completion: int | None
) -> Iterator[str]:
    """Yield what a prediction means, a sentence each."""
    low, high, gpu = prediction.low_bytes, prediction.high_bytes, predictor.gpu_bytes
    yield f"The phase `{prediction.binding}` (*) needs most: {_gib(low)} to {_gib(high)} GiB."
    if gpu is not None:
        if high <= gpu:
            yield f"It fits into {_gib(gpu)} GiB."
        elif low > gpu:
            yield f"It does not fit into {_gib(gpu)} GiB."
        else:
            yield f"It may not fit into {_gib(gpu)} GiB: the range contains that size."
    first = max(prediction.first_step.values())
    traced = max(sum(memory.traced.values()) for memory in prediction.phases.values())
    if traced - first > _GIB / 100:
        yield f"The first step needs {_gib(traced - first)} GiB less than later ones, which have optimizer state."
    if batch is not None:
        yield f"Largest micro-batch at these lengths: {batch} rows."
    if completion is not None:
        yield f"Longest completion at this micro-batch: {completion} tokens."
    found = prediction.fit_of(prediction.binding)
    if found is not None:
        yield (
            f"Allocated in `{prediction.binding}`: {_gib(found.fixed_bytes)} GiB + {found.token_bytes / 1024:.1f} KiB per token of the"
            f" micro-batch + {found.pair_bytes:.2f} B per row and squared length; another trace is off by"
            f" {100 * found.residual:.2f} %."
        )
    for phase, expected in prediction.closed_form.items():
        traced = sum(prediction.phases[phase].traced.values())
        if not 1 / SUSPICIOUS <= traced / expected <= SUSPICIOUS:
            yield f"Traced and closed form disagree in `{phase}`: {_gib(traced)} and {_gib(expected)} GiB; treat with care."


def as_json(
    model: str,
    predictor: Predictor,
    prediction: Prediction,
    changes: Sequence[Outcome],
    batch: int | None,
    completion: int | None,
) -> dict[str, Any]:
    """Return a prediction for programs; all sizes in bytes."""
    return {
        "model": model,
        "parameters": predictor.shape.parameters,
        "gpu_bytes": predictor.gpu_bytes,
        "job": vars(prediction.job),
        "binding_phase": prediction.binding,
        "low_bytes": round(prediction.low_bytes),
        "high_bytes": round(prediction.high_bytes),
        "allocated_bytes": round(prediction.allocated_bytes),
        "fits": None if predictor.gpu_bytes is None else prediction.high_bytes <= predictor.gpu_bytes,
        "fragmentation_bytes": prediction.fragmentation_bytes,
        "phases": {
            phase: {
                "allocated_bytes": round(memory.allocated_bytes),
                "low_bytes": round(memory.low_bytes),
                "high_bytes": round(memory.high_bytes),
                "closed_form_bytes": round(prediction.closed_form[phase])
                if phase in prediction.closed_form
                else None,
                "kinds": {kind: round(_of(memory, kind)) for kind in KINDS},
                "added": {name: [round(low), round(high)] for name, (low, high) in memory.extra.items()},
                "fit": None if (found := prediction.fit_of(phase)) is None else vars(found),
            }
            for phase, memory in prediction.phases.items()
        },
        "first_step_bytes": {phase: round(size) for phase, size in prediction.first_step.items()},
        "terms": [vars(term) for term in prediction.terms],
        "largest_batch": batch,
        "largest_completion": completion,
        "changes": [
            {
                "name": one.change.name,
                "cost": one.change.cost,
                "exact": one.change.exact,
                "high_bytes": round(one.high_bytes),
                "saved_bytes": round(one.saved_bytes),
                "fits": one.fits,
            }
            for one in changes
        ],
        "compared_with_gpu": False,
    }


def _change_text(one: Outcome) -> str:
    fits = "" if one.fits is None else ", fits" if one.fits else ", does not fit"
    cost = one.change.cost if one.change.exact else f"{one.change.cost}; other optimizer steps"
    return f"{_gib(one.high_bytes)} (-{_gib(one.saved_bytes)}{fits}): {one.change.name}; cost: {cost}"


def _of(memory: PhaseMemory, kind: str) -> float:
    return memory.traced.get(kind, 0.0)


def _gib(size: float) -> str:
    return f"{size / _GIB:.2f}" if abs(size) < 100 * _GIB else f"{size / _GIB:.0f}"


def _range(low: float, high: float) -> str:
    return _gib(low) if low == high else f"{_gib(low)}-{_gib(high)}"


def _say(text: str, hanging: str = "") -> None:
    print(
        textwrap.fill(text, WIDTH, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False)
    )
