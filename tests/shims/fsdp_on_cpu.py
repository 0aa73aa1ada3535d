"""Make FSDP shard on CPU ranks with Gloo, where accelerate alone silently uses DDP.

`AcceleratorState.__init__` reads the FSDP plugin only when its distributed type is one of the MULTI_*
accelerators, so on MULTI_CPU it uses DDP. `install` repeats, after the original ran on MULTI_CPU, the
assignments of that branch. The scripts under `tests/scripts` call it where TEST_FSDP_ON_CPU=1.

For tests only: it does not make FSDP on CPU supported or fast.
"""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any

REQUIRED_PARAMETERS = ("mixed_precision", "cpu", "fsdp_plugin")


class ShimOutdated(RuntimeError):
    """accelerate's code differs from what this shim patches."""


def check() -> None:
    """Raise `ShimOutdated` unless accelerate's code is what the shim patches."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    parameters = inspect.signature(inspect.unwrap(AcceleratorState.__init__)).parameters
    missing = [name for name in REQUIRED_PARAMETERS if name not in parameters]
    if missing:
        raise ShimOutdated(f"AcceleratorState.__init__ has no parameter {', '.join(missing)}")
    for state in (PartialState, AcceleratorState):
        if not isinstance(getattr(state, "_shared_state", None), dict):
            raise ShimOutdated(f"{state.__name__}._shared_state is not a dict")
    if not {"FSDP", "MULTI_CPU"} <= set(DistributedType.__members__):
        raise ShimOutdated("DistributedType has no FSDP or no MULTI_CPU")
    source = inspect.getsource(inspect.unwrap(AcceleratorState.__init__))
    branch = source.partition("DistributedType.MULTI_GPU,")[2]
    for statement in (
        "self.distributed_type = DistributedType.FSDP",
        "self.fsdp_plugin = fsdp_plugin",
        "fsdp_plugin.set_mixed_precision(self._mixed_precision)",
        'PartialState._shared_state["distributed_type"] = self.distributed_type',
    ):
        if statement not in branch:
            raise ShimOutdated(f"AcceleratorState.__init__ no longer contains: {statement}")


def install() -> None:
    """Patch `AcceleratorState.__init__`; idempotent. Raises `ShimOutdated`."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    original = AcceleratorState.__init__
    if hasattr(original, "fsdp_on_cpu"):
        return
    check()
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialise(self: Any, *positional: Any, **named: Any) -> None:
        original(self, *positional, **named)
        plugin = signature.bind(self, *positional, **named).arguments.get("fsdp_plugin")
        wanted = plugin is not None and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
        if wanted and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            if self._mixed_precision != "no":
                plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = plugin
            PartialState._shared_state["distributed_type"] = self.distributed_type

    initialise.fsdp_on_cpu = True  # type: ignore[attr-defined]
    AcceleratorState.__init__ = initialise
