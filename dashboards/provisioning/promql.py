"""Finds the metric and label names in a PromQL expression, so that a query cannot ask for what is not exported.

Used when the dashboard and the alert rules are generated, and by their tests. Reads names only: whether an
expression is valid PromQL is `promtool`'s to say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

GROUPING = frozenset({"by", "without", "on", "ignoring", "group_left", "group_right"})
WORDS = frozenset({"and", "or", "unless", "bool", "offset", "inf", "nan", "atan2", "start", "end"})
"""Identifiers that are neither metrics nor functions; matched without regard to case, as Prometheus does."""

_STRING = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|`[^`]*`')
_RANGE = re.compile(r"\[[^\]]*\]")
_DURATION = re.compile(r"\b\d+(?:\.\d+)?[a-zA-Z]\w*")
_GROUP = re.compile(rf"\b({'|'.join(sorted(GROUPING))})\s*\(([^)]*)\)", re.IGNORECASE)
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)?\s*\{([^{}]*)\}")
_MATCHER = re.compile(r"([a-zA-Z_]\w*)\s*(?:=~|!~|!=|=)")
_NAME = re.compile(r"[a-zA-Z_:][\w:]*")


def unknown_names(expression: str, labels: Mapping[str, frozenset[str]]) -> list[str]:
    """The names in `expression` that the catalogue does not have, in order of appearance by kind.

    Args:
        expression: PromQL; Grafana variables may stand in strings and ranges.
        labels: metric name to the names of its labels.

    Returns:
        `metric`, or `metric{label}` for a label that the metric lacks, or `label` in a grouping that no
        metric of the expression has. A selector without a metric name is returned as `{}`.
    """
    text = _RANGE.sub(" ", _STRING.sub('""', expression))
    used, unknown = _metrics(text), []
    unknown += [name for name in used if name not in labels]
    for name, matchers in _SELECTOR.findall(text):
        if not name:
            unknown.append("{}")
        known = labels.get(name)
        if known is not None:
            unknown += [f"{name}{{{label}}}" for label in _MATCHER.findall(matchers) if label not in known]
    grouped = {label for _, inside in _GROUP.findall(text) for label in _NAME.findall(inside)}
    known_anywhere = frozenset[str]().union(*(labels.get(name, frozenset()) for name in used))
    return unknown + sorted(grouped - known_anywhere)


def _metrics(text: str) -> list[str]:
    text = _SELECTOR.sub(lambda match: f" {match[1] or ''} ", _GROUP.sub(" ", text))
    text = _DURATION.sub(" ", text)
    names = []
    for match in _NAME.finditer(text):
        is_function = text[match.end() :].lstrip().startswith("(")
        if not is_function and match[0].lower() not in WORDS and match[0] not in names:
            names.append(match[0])
    return names
