"""A prediction as text of 80 columns. Called by `plan.py`."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_run.cli.planning.report import Report
from grpo_run.cli.text.paragraph import print_paragraph
from grpo_run.cli.text.table import print_table
from grpo_run.trainers.planning.changes import Outcome
from grpo_run.trainers.planning.job import NAMED_OPTIMIZERS
from grpo_run.trainers.planning.prediction import PhaseMemory
from grpo_run.trainers.planning.presets import Choice
from grpo_run.trainers.planning.sizes import SUSPICIOUS
from grpo_run.trainers.planning.timeline import KINDS

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


def print_plan(report: Report) -> None:
    """Print a prediction: ledger, verdict, what fits, and changes."""
    prediction, shape = report.prediction, report.shape
    job = prediction.job
    adapters = (
        f"LoRA of rank {job.lora_rank} ({prediction.trained_parameters / 1e6:,.1f} M trained)"
        if job.lora_rank
        else ""
    )
    print_paragraph(
        f"{report.model}: {shape.parameters / 1e6:,.1f} M parameters, {shape.layers} layers; micro-batch of {job.batch}"
        f" rows, {job.prompt} + {job.completion} tokens, {job.weights} weights{', bf16 autocast' if job.autocast else ''},"
        f" {'with' if job.checkpointing else 'without'} gradient checkpointing, {job.optimizer}"
        f"{', ' + adapters if adapters else ''}{', RLOO' if job.algorithm == 'rloo' else ''}"
    )
    for note in report.notes:
        print_paragraph(f"Note: {note}")
    if report.choice is not None:
        _print_choice(report.choice)
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
    for sentence in sentences(report):
        print_paragraph(sentence)
    if prediction.terms:
        print("\nAdded to what was traced, GiB:")
        for term in prediction.terms:
            print_paragraph(f"{term.name}: {_range(term.low_bytes, term.high_bytes)} ({term.provenance})")
    if report.changes:
        print("\nChanges, each predicted again (GiB with it, and saved):")
        for one in report.changes:
            print_paragraph(_change_text(one), hanging="      ")
    if job.device == "cuda":
        print()
        print_paragraph(NOT_COMPARED)


def _print_choice(choice: Choice) -> None:
    """Print what a preset has chosen, as it is written in a script."""
    print()
    print_paragraph(
        f"Preset {choice.name}: {choice.preset.about}. It leaves {100 * choice.free_share:.0f} % free."
    )
    print(f"\n{'GRPOConfig' if choice.prediction.job.algorithm == 'grpo' else 'RLOOConfig'}(")
    for name, value in choice.settings.items():
        print(f"    {name}={value},")
    print("    ...\n)")


def sentences(report: Report) -> Iterator[str]:
    """Yield what a prediction means, a sentence each."""
    prediction = report.prediction
    low, high, gpu = prediction.low_bytes, prediction.high_bytes, report.gpu_bytes
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
    if report.largest_batch is not None:
        yield f"Largest micro-batch at these lengths: {report.largest_batch} rows."
    if report.largest_completion is not None:
        yield f"Longest completion at this micro-batch: {report.largest_completion} tokens."
    found = prediction.fit_of(prediction.binding)
    if found is not None:
        yield (
            f"Allocated in `{prediction.binding}`: {_gib(found.fixed_bytes)} GiB + {found.token_bytes / 1024:.1f} KiB per token of the"
            f" micro-batch + {found.pair_bytes:.2f} B per row and squared length; another trace is off by"
            f" {100 * found.residual:.2f} %."
        )
    if modelled := NAMED_OPTIMIZERS.get(prediction.job.optimizer):
        yield (
            f"The state of {prediction.job.optimizer} is modelled by name: {modelled[0]} of {modelled[1]} B per weight,"
            " embeddings in fp32."
        )
    for phase, expected in prediction.closed_form.items():
        traced = sum(prediction.phases[phase].traced.values())
        if not 1 / SUSPICIOUS <= traced / expected <= SUSPICIOUS:
            yield f"Traced and closed form disagree in `{phase}`: {_gib(traced)} and {_gib(expected)} GiB; treat with care."


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
