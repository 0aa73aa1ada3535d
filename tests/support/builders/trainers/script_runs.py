"""A script that runs in the test process, and the error file that it leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[..., int]


def written(session: Any) -> dict[str, Any]:
    """Return the content of the rank's error file."""
    value: dict[str, Any] = json.loads(Path(session.settings.error).read_text())
    return value
