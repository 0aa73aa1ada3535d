"""Stand-in for vLLM 0.31 in the ranks of a test: the names that TRL imports, for its server mode only.

Weights go to the stand-in server over TCP (`distributed`) instead of NCCL. See `cpu_communicator`.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.31.0"


class LLM:
    """An engine in the process of a rank, which the stand-in does not have."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError('the stand-in for vLLM has only vllm_mode="server"')


class RequestOutput:
    """The type of what such an engine returns."""


class SamplingParams:
    """Arguments of such an engine."""
