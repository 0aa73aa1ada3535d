"""The names of metrics and labels in a PromQL expression, as parsed by promql-parser."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import promql_parser

from grpo_run.dashboards.metrics.catalogue import ALL_METRICS

HISTOGRAM_PARTS: dict[str, set[str]] = {"bucket": {"le"}, "sum": set(), "count": set()}


def exported() -> dict[str, frozenset[str]]:
    """Return the labels of every series that an exporter has, by the name that a query uses."""
    names: dict[str, frozenset[str]] = {}
    for metric in ALL_METRICS:
        labels = {*metric.labels, "run_id"}
        if metric.kind == "histogram":
            names |= {
                f"{metric.name}_{part}": frozenset(labels | more) for part, more in HISTOGRAM_PARTS.items()
            }
        else:
            names[metric.name] = frozenset(labels)
    return names


def parsed(expression: str) -> promql_parser.Expr:
    """Parse a query of a dashboard or a rule.

    Raises:
        ValueError: it is not valid PromQL.
    """
    return promql_parser.parse(expression.replace("$__rate_interval", "1m"))


def unknown_names(expression: str, labels: Mapping[str, frozenset[str]]) -> list[str]:
    """Return the names in `expression` that no exporter has: `metric`, `metric{label}`, or a label in a
    grouping that no metric of the expression has.

    Raises:
        ValueError: it is not valid PromQL.
    """
    unknown, used, grouped = [], set[str](), set[str]()
    for node in _nodes(parsed(expression)):
        if isinstance(node, promql_parser.VectorSelector):
            if node.name not in labels:
                unknown.append(node.name or "{}")
                continue
            used |= labels[node.name]
            matched = (matcher.name for matcher in node.matchers.matchers)
            unknown += [f"{node.name}{{{label}}}" for label in matched if label not in labels[node.name]]
        elif isinstance(node, (promql_parser.LabelModifier, promql_parser.AggModifier)):
            grouped |= set(node.labels)
    return unknown + sorted(grouped - used)


def metrics_in(expression: str) -> set[str]:
    """Return the names of the metrics in a query, without the parts of histograms."""
    kinds = {metric.name: metric.kind for metric in ALL_METRICS}
    found = {
        node.name for node in _nodes(parsed(expression)) if isinstance(node, promql_parser.VectorSelector)
    }
    return {name if name in kinds else name.rpartition("_")[0] for name in found if name}


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for name in ("lhs", "rhs", "expr", "param", "vector_selector", "modifier", "matching"):
        child = getattr(node, name, None)
        if child is not None:
            yield from _nodes(child)
    for child in getattr(node, "args", None) or ():
        yield from _nodes(child)
