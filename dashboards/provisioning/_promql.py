"""Find metric and label names in a PromQL expression that the catalogue does not have.

Called when the dashboard and the alert rules are generated. Prometheus answers a query for a name that does
not exist with an empty result, so a misspelled alert rule would silently never fire. Checks names only;
whether an expression is valid PromQL is checked by `promtool` and by a real Prometheus in the integration
tests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

GROUPING = frozenset({"by", "without", "on", "ignoring", "group_left", "group_right"})
KEYWORDS = frozenset({"and", "or", "unless", "bool", "offset", "inf", "nan", "atan2", "start", "end"})
"""Identifiers that are neither metrics nor functions; compared case-insensitively, as in Prometheus."""

_STRING = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|`[^`]*`')
_RANGE = re.compile(r"\[[^\]]*\]")
_DURATION = re.compile(r"\b\d+(?:\.\d+)?[a-zA-Z]\w*")
_GROUP = re.compile(rf"\b({'|'.join(sorted(GROUPING))})\s*\(([^)]*)\)", re.IGNORECASE)
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)?\s*\{([^{}]*)\}")
_MATCHER = re.compile(r"([a-zA-Z_]\w*)\s*(?:=~|!~|!=|=)")
_NAME = re.compile(r"[a-zA-Z_:][\w:]*")


def unknown_names(expression: str, labels: Mapping[str, frozenset[str]]) -> list[str]:
    """Return the names in `expression` that the catalogue does not have.

    Args:
        expression: PromQL; may contain Grafana variables in strings and ranges.
        labels: names of the labels of each metric.

    Returns:
        `metric` for an unknown metric, `metric{label}` for a label that the metric does not have, and `label`
        for a label in a grouping that no metric of the expression has. A selector without a metric name is
        returned as `{}`.
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
        if not is_function and match[0].lower() not in KEYWORDS and match[0] not in names:
            names.append(match[0])
    return names
