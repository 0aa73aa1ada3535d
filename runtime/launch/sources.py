"""Names in syntax trees, for `cli/planning/`."""

from __future__ import annotations

import ast


def last_name(node: ast.expr) -> str:
    """Return `b` for the expressions `b` and `a.b`; "" for any other one."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
