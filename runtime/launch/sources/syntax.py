"""Parse a source, and read names and texts from its nodes. Called by the other files of this folder and by `cli.planning.reading`."""

from __future__ import annotations

import ast


def parsed(source: str) -> list[ast.AST]:
    """Return every node of a source; none if it has a syntax error, which Python reports better when it runs it."""
    try:
        return list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError):
        return []


def is_environ(node: ast.expr) -> bool:
    """Whether a node is `os.environ` or `environ`."""
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
        isinstance(node, ast.Name) and node.id == "environ"
    )


def literal_text(node: ast.expr | None) -> set[str]:
    """Return the text of a literal; nothing for any other node."""
    return {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()


def keys(node: ast.expr) -> set[str]:
    """Return the literal keys of `{...}` or `dict(...)`."""
    if isinstance(node, ast.Dict):
        return set().union(*(literal_text(key) for key in node.keys if key is not None))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
        return {keyword.arg for keyword in node.keywords if keyword.arg}
    return set()


def last_name(node: ast.expr) -> str:
    """Return `b` for the expressions `b` and `a.b`; "" for any other one."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
