"""Makes findings from what was observed. Used by `tracer.py`; decides and prints nothing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable

from grpo_run.runtime.rank.memory_trace.census import Group
from grpo_run.runtime.rank.memory_trace.collected import Collected
from grpo_run.runtime.rank.memory_trace.cycles import Cycle
from grpo_run.runtime.rank.memory_trace.dropped_graphs import Dropped
from grpo_run.runtime.rank.memory_trace.finding import Place, TraceFinding
from grpo_run.runtime.rank.memory_trace.growth import Gain, Longer
from grpo_run.runtime.rank.memory_trace.holders import Holder
from grpo_run.runtime.rank.memory_trace.ledger import StorageEntry
from grpo_run.runtime.rank.memory_trace.names import Name
from grpo_run.runtime.rank.memory_trace.padding import Padded
from grpo_run.runtime.rank.memory_trace.sites import Site
from grpo_run.runtime.rank.memory_trace.tracebacks import KeptFrame
from grpo_run.watchdog.evidence.source import is_outside_frameworks


def kept_by(held: Collection[StorageEntry], direct: Collection[int]) -> str:
    """Return the kind of what a holder keeps: most of it by itself, or by an autograd graph.

    Args:
        held: storages that the holder keeps.
        direct: storages that it reaches without an autograd graph.
    """
    saved = sum(one.bytes for one in held if one.key not in direct)
    return "graph" if 2 * saved > sum(one.bytes for one in held) else "growth"


def of_holder(
    holder: Holder, held: Collection[StorageEntry], kind: str, details: dict[str, object]
) -> TraceFinding:
    """Return what a holder keeps; of several kinds of tensors, the one that takes most.

    Args:
        held: storages that the holder keeps, or those that its graph has saved.
        kind: `growing`, `growth` or `graph`.
    """
    shown = _largest(held)
    unnamed = f"{_article(holder.kind)} without a name"
    return _finding(
        kind, shown, steps=len({one.born for one in shown}),
        holder=named(holder.name, holder.kind) if holder.name is not None else unnamed,
        held_at=_place_of(holder.name), details={"ends_graph": holder.ends_graph, **details},
    )  # fmt: skip


def of_longer(
    longer: Longer, entry: StorageEntry, name: Name, kind: str, details: dict[str, object]
) -> TraceFinding:
    """Return a tensor that is replaced by a longer one step after step."""
    return _finding(
        kind, [entry], steps=longer.steps, holder=named(name, "Tensor"), held_at=_place_of(name),
        details={"first_step": longer.first_step, "first_bytes": longer.first_bytes, **details},
    )  # fmt: skip


def forecast(gain: Gain, steps_left: int, free_bytes: int) -> dict[str, object]:
    """Return the figures of growth that does not fit until the run ends."""
    rate = gain.gained_bytes // gain.steps
    return {"bytes_a_step": rate, "steps_left": steps_left, "free_bytes": free_bytes}


def of_cycle(cycle: Cycle, entries: Collection[StorageEntry]) -> TraceFinding:
    """Return a cycle that keeps storages until garbage is collected."""
    shown = _largest(entries)
    return _finding(
        "cycle",
        shown,
        steps=len({one.born for one in shown}),
        holder=_cycle_text(cycle),
        held_at=Place(file=cycle.file, line=cycle.line) if cycle.file else None,
    )


def of_collected(cycle: Cycle, group: Group, collected: Collected, site: Site | None) -> TraceFinding:
    """Return a cycle whose tensors were freed by collections."""
    return TraceFinding(
        kind="cycle",
        tensors=collected.tensors,
        bytes=collected.bytes,
        shape=collected.shape,
        dtype=group.dtype,
        since_step=min(collected.steps),
        steps=len(collected.steps),
        made_at=_made_at(site),
        made_in=_made_in(site),
        holder=_cycle_text(cycle),
        held_at=Place(file=cycle.file, line=cycle.line) if cycle.file else None,
        details={"collected": True},
    )


def of_traceback(
    kept: KeptFrame, error: str, name: Name | None, entries: Collection[StorageEntry], steps: int
) -> TraceFinding:
    """Return an exception that keeps the local variables of a function."""
    holder = f"the traceback of {error}"
    if name is not None:
        holder += f" that {named(name)} keeps"
    return _finding(
        "traceback",
        _largest(entries),
        steps=steps,
        holder=f"{holder}, raised",
        held_at=Place(file=kept.file, line=kept.line, function=kept.function),
        details={"kept_at": None if (at := _place_of(name)) is None else {"file": at.file, "line": at.line}},
    )


def of_dropped(dropped: Dropped) -> TraceFinding:
    """Return graphs of calls that were kept within a step and dropped without a backward pass."""
    return TraceFinding(
        kind="dropped_graph",
        tensors=dropped.calls,
        bytes=dropped.bytes,
        shape=dropped.shape,
        dtype=dropped.dtype,
        since_step=dropped.step,
        steps=dropped.steps,
        made_at=_made_at(dropped.site),
        made_in=_made_in(dropped.site),
        details={},
    )


def of_padding(padded: Padded) -> TraceFinding:
    """Return calls that are padded to the longest possible."""
    site = padded.made or padded.site
    return TraceFinding(
        kind="padding",
        tensors=padded.batches,
        bytes=0,
        shape=(padded.rows, padded.width),
        dtype=padded.group.dtype,
        since_step=padded.first_step,
        steps=padded.steps,
        made_at=_made_at(site),
        made_in=_made_in(site),
        details={
            "width": padded.width,
            "longest": padded.longest,
            "share": round(padded.share, 4),
        },
    )


def named(name: Name, kind: str | None = None) -> str:
    """Return a name as `list 'history' of Collector`."""
    variable = name.variable
    if variable.owner is not None:
        where = f" of {variable.owner}"
    elif variable.function is not None:
        where = f" in {variable.function}()"
    else:
        where = ""
    text = f"{_lower(name.kind)} `{variable.name}`{where}"
    return f"{_article(kind)} in {text}" if name.inside and kind is not None else text


def _lower(kind: str) -> str:
    return "tensor" if kind == "Tensor" else kind


def _article(kind: str) -> str:
    kind = _lower(kind)
    return f"{'an' if kind[:1].lower() in 'aeio' else 'a'} {kind}"


def _cycle_text(cycle: Cycle) -> str:
    through = f" through its attribute `{cycle.attribute}`" if cycle.attribute else ""
    return f"a reference cycle of {cycle.kind}{through}"


def _largest(entries: Iterable[StorageEntry]) -> list[StorageEntry]:
    groups: dict[Group, list[StorageEntry]] = defaultdict(list)
    for one in entries:
        groups[one.group].append(one)
    return max(groups.values(), key=lambda alike: sum(one.bytes for one in alike))


def _finding(
    kind: str,
    shown: list[StorageEntry],
    *,
    steps: int,
    holder: str,
    held_at: Place | None,
    details: dict[str, object] | None = None,
) -> TraceFinding:
    newest = max(shown, key=lambda one: (one.born, one.bytes))
    sites = Counter(one.site for one in shown if one.site is not None)
    site = sites.most_common(1)[0][0] if sites else None
    return TraceFinding(
        kind=kind,
        tensors=len(shown),
        bytes=sum(one.bytes for one in shown),
        shape=newest.shape,
        dtype=newest.group.dtype,
        since_step=min(one.born for one in shown),
        steps=steps,
        made_at=_made_at(site),
        made_in=_made_in(site),
        holder=holder,
        held_at=held_at,
        details=details or {},
    )


def _made_at(site: Site | None) -> Place | None:
    return None if site is None else Place(file=site.file, line=site.line, function=site.function)


def _made_in(site: Site | None) -> Place | None:
    if site is None or site.library_file is None:
        return None
    return Place(file=site.library_file, line=site.library_line)


def _place_of(name: Name | None) -> Place | None:
    if name is None or not is_outside_frameworks(name.variable.file):
        return None
    return Place(file=name.variable.file, line=name.variable.line, function=name.variable.function)
