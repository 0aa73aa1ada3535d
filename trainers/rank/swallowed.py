"""Whether the `__context__` of an exception had already been handled when the exception was raised.

Called by `error_report.py`: an exhausted GPU that a cleanup fails on is what ended the rank; one that the script has caught
and gone on after, as a search for a batch size does, is not. Reads the source of the function that caught it; where there is none,
nothing counts as swallowed.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from types import TracebackType

MAX_SOURCE_CHARACTERS = 2 << 20
"""A longer source is not read."""


def swallowed(error: BaseException) -> bool:
    """Whether `error.__context__` was caught by an `except` clause that neither passes it on nor raises `error` itself.

    Passing on is a `raise` as the last thing that the clause does; a cleanup before it may have failed. Exceptions
    that are raised in `finally` or on the way out of a `with` block did not end the context.
    """
    context = error.__context__
    caught = context.__traceback__ if context is not None else None
    if caught is None:
        return False
    raised = next((step for step in _steps(error.__traceback__) if step.tb_frame is caught.tb_frame), None)
    if raised is None:
        return False
    tree = _source_of(raised)
    handler = _innermost_handler(tree, caught.tb_lineno, raised.tb_lineno) if tree is not None else None
    if handler is None:
        return False
    at = raised.tb_lineno
    raises_itself = any(isinstance(node, ast.Raise) and _covers(node, at) for node in ast.walk(handler))
    return not raises_itself and not _passes_on(handler, at)


def _steps(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _source_of(step: TracebackType) -> ast.Module | None:
    code = step.tb_frame.f_code
    text = "".join(linecache.getlines(code.co_filename, step.tb_frame.f_globals))
    if not text or len(text) > MAX_SOURCE_CHARACTERS:
        return None
    try:
        return ast.parse(text)
    except (
        SyntaxError,
        ValueError,
        RecursionError,
    ):  # the file has changed since it was imported, or is no Python
        return None


def _innermost_handler(tree: ast.Module, caught_at: int, raised_at: int) -> ast.ExceptHandler | None:
    """Return the `except` clause that contains one line, of a `try` block that contains the other."""
    found = None
    for node in ast.walk(tree):  # outer nodes come before inner ones
        if isinstance(node, ast.Try) and any(_covers(part, caught_at) for part in node.body):
            found = next((one for one in node.handlers if _covers(one, raised_at)), found)
    return found


def _passes_on(handler: ast.ExceptHandler, after: int) -> bool:
    """Whether the clause always raises what it has caught, after a line."""
    last = handler.body[-1]
    if not isinstance(last, ast.Raise) or last.lineno <= after:
        return False
    return last.exc is None or (isinstance(last.exc, ast.Name) and last.exc.id == handler.name)


def _covers(node: ast.stmt | ast.ExceptHandler, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)
