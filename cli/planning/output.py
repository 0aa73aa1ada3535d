"""A prediction as text of 80 columns, with one unit for all of its figures.

Called by `cli/plan.py`. Predicts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from grpo_run.cli.planning.report import PlanReport
from grpo_run.cli.text import print_paragraph, print_table
from grpo_run.runtime.planning.changes import MOST_ROWS, ChangeOutcome, rows_of_unit
from grpo_run.runtime.planning.job import KINDS, NAMED_OPTIMIZERS

_GIB = 1 << 30


class Unit(NamedTuple):
    """A unit: its name, its size in bytes, and the digits that are shown after the point."""

    name: str
    size: int
    digits: int

    @property
    def visible_bytes(self) -> float:
        """The smallest size that is not printed as 0."""
        return float(self.size * 10**-self.digits / 2)

    def text(self, size: float) -> str:
        """Return a size without the unit."""
        return f"{size / self.size:.{self.digits if abs(size) < 100 * _GIB else 0}f}"

    def said(self, size: float) -> str:
        """Return a size with the unit."""
        return f"{self.text(size)} {self.name}"

    def range(self, low: float, high: float, between: str = "-") -> str:
        """Return a range without the unit, or one figure if its ends are equal."""
        return self.text(low) if low == high else f"{self.text(low)}{between}{self.text(high)}"


GIB = Unit("GiB", _GIB, digits=2)
MIB = Unit("MiB", 1 << 20, digits=1)


def unit_of(allocated_bytes: float) -> Unit:
    """Return the unit for a job whose tensors need this much: a small one would be all zeros in GiB."""
    return GIB if allocated_bytes >= _GIB else MIB


SHORT = {"gradients": "grads", "optimizer": "optim", "activations": "activ", "rollout": "rollout"}
NOT_COMPARED = (
    "Compared with real runs on a CPU only (docs/guide/planning.md). Figures for a GPU have never been"
    " compared with one: kernels, context, workspaces and NCCL are modelled by name."
)


def print_plan(report: PlanReport) -> None:
    """Print a prediction: verdict, ledger, what fits, and changes."""
    prediction, shape = report.prediction, report.shape
    job, unit = prediction.job.as_run, unit_of(prediction.allocated_bytes)
    adapters = (
        f"LoRA of rank {job.lora_rank} ({count_text(prediction.trained_parameters)} trained)"
        if job.lora_rank
        else ""
    )
    print_paragraph(verdict(report))
    print_paragraph(
        f"{report.model}: {count_text(shape.parameters)} parameters, {shape.layers} layers;"
        f" {job.algorithm.upper()}; micro-batch of {job.batch} rows of {job.lengths}, {job.weights}"
        f" weights{', bf16 autocast' if job.autocast else ''}, {'with' if job.checkpointing else 'without'}"
        f" gradient checkpointing, {job.optimizer}{', ' + adapters if adapters else ''}"
    )
    for note in report.notes:
        print_paragraph(f"Note: {note}")
    print(f"\nPeak of each phase on one rank, {unit.name}:\n")
    kinds = [
        kind
        for kind in KINDS
        if any(memory.traced.get(kind, 0.0) >= unit.visible_bytes for memory in prediction.phases.values())
    ]
    rows = [["phase", *(SHORT.get(kind, kind) for kind in kinds), "added", "allocated", "device"]]
    for phase, memory in prediction.phases.items():
        added = memory.allocated_bytes - sum(memory.traced.values())
        mark = "*" if phase == prediction.binding else ""
        rows.append(
            [
                phase + mark,
                *(unit.text(memory.traced.get(kind, 0.0)) for kind in kinds),
                unit.text(added),
                unit.text(memory.allocated_bytes),
                unit.range(memory.low_bytes, memory.high_bytes),
            ]
        )
    print_table(rows)
    print()
    print_paragraph(
        "allocated: what torch's allocator holds, with what is added to the trace. device: what the process"
        " uses of the device, from the lowest to the highest estimate."
        if job.device == "cuda"
        else "allocated: what torch's allocator holds. device: the same, as this is a CPU."
    )
    print()
    for sentence in sentences(report):
        print_paragraph(sentence)
    if prediction.terms:
        print(f"\nAdded to what was traced, {unit.name}:")
        for term in prediction.terms:
            print_paragraph(f"{term.name}: {unit.range(term.low_bytes, term.high_bytes)} ({term.provenance})")
    if report.changes:
        print(f"\nChanges, each predicted again ({unit.name} with it, and saved):")
        for one in report.changes:
            print_paragraph(_change_text(one, unit), hanging="      ")
    if job.device == "cuda":
        print()
        print_paragraph(NOT_COMPARED)


def count_text(parameters: int) -> str:
    """Return a number of parameters."""
    return f"{parameters / 1e6:,.1f} M" if parameters >= 100_000 else f"{parameters:,}"


def verdict(report: PlanReport) -> str:
    """Return whether the job fits and by how much; what it needs, if no GPU is known."""
    prediction, gpu = report.prediction, report.gpu_bytes
    low, high, unit = prediction.low_bytes, prediction.high_bytes, unit_of(prediction.allocated_bytes)
    size = f"{unit.range(low, high, ' to ')} {unit.name}"
    needs = f"`{prediction.binding}` (*) needs most, {size}"
    if gpu is None:
        return f"Needs {size} on one rank: `{prediction.binding}` (*) needs most."
    if high <= gpu:
        return f"Fits into {GIB.said(gpu)}, {unit_of(gpu - high).said(gpu - high)} stay free: {needs}."
    if low > gpu:
        return f"Does not fit into {GIB.said(gpu)}, by {unit.said(low - gpu)} at least: {needs}."
    return f"May not fit into {GIB.said(gpu)}, by {unit.said(high - gpu)} at most: {needs}."


def sentences(report: PlanReport) -> Iterator[str]:
    """Yield what a prediction means, a sentence each."""
    job = report.prediction.job
    if report.largest_batch is not None:
        group = job.num_generations
        whole = f", so that a rollout has whole groups of num_generations={group}" if group > 1 else ""
        more = " or more" if report.largest_batch + rows_of_unit(job) > MOST_ROWS else ""
        yield f"Largest micro-batch at these lengths: {report.largest_batch} rows{more}{whole}."
    if modelled := NAMED_OPTIMIZERS.get(job.optimizer):
        yield (
            f"The state of {job.optimizer} is modelled by name: {modelled[0]} of {modelled[1]} B per weight,"
            " embeddings in fp32."
        )


def _change_text(one: ChangeOutcome, unit: Unit) -> str:
    fits = "" if one.fits is None else ", fits" if one.fits else ", does not fit"
    cost = one.change.cost if one.change.exact else f"{one.change.cost}; changes the update"
    return (
        f"{unit.text(one.high_bytes)} (-{unit.text(one.saved_bytes)}{fits}): {one.change.name}; cost: {cost}"
    )
