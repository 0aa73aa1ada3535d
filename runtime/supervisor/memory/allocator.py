"""Expandable segments of torch's allocator: the variables that turn them on, and whether vLLM accepts them.

torch reads the variables when a process first uses its GPU. Called by `cli.launching`, which adds them to a
rank's environment, and by `runtime/supervisor/run_memory.py`. Imports neither torch nor vLLM.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The names before and since torch 2.10. vLLM inspects the first only, so both are set."""
SETTING = "expandable_segments"
_MEMORY_POOL = Path("device_allocator", "cumem.py")
"""vLLM's allocator for its sleep mode."""
_REFUSAL = "Expandable segments are not compatible"
"""What versions before vllm#40812 assert in it."""
MAX_SOURCE_BYTES = 1 << 20


def expandable_segments(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that turn expandable segments on and keep the user's other settings.

    Args:
        environment: the rank's, without them.
    """
    return {
        name: ",".join(filter(None, (environment.get(name, "").strip(" ,"), f"{SETTING}:True")))
        for name in VARIABLES
    }


def sets_segments(environment: Mapping[str, str]) -> bool:
    """Whether the user's environment decides about expandable segments."""
    return any(SETTING in environment.get(name, "") for name in VARIABLES)


def refused_by_vllm() -> str:
    """Return why the installed vLLM does not run with expandable segments while it sleeps, as a clause; empty
    if it does.
    """
    try:
        found = importlib.util.find_spec("vllm")
    except (ImportError, ValueError):
        return ""
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        path = Path(folder, _MEMORY_POOL)
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read(MAX_SOURCE_BYTES)
        except OSError:
            continue
        if _REFUSAL in text:
            return "this version of vLLM does not sleep with expandable segments"
    return ""
