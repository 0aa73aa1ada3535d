"""Lets TRL's client send weights from a CPU; a script calls `install` before it makes a trainer.

No method is replaced: `init_communicator` refuses every device but CUDA, and is told CUDA. What it does
with the device is vLLM's, which is the stand-in.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any


def install() -> None:
    """Prepare `trl.generation`, also where it was imported before this package was in the path."""
    client = importlib.import_module("trl.generation.vllm_client")
    if not hasattr(client, "get_ip"):  # in a forkserver that was forked from the tests' warm launcher
        transfer = "vllm.distributed.weight_transfer"
        client.__dict__.update(
            get_ip=importlib.import_module("vllm.utils.network_utils").get_ip,
            open_trainer_endpoint=importlib.import_module(f"{transfer}.nccl_common").trainer_init,
            packed_nccl_broadcast_producer=importlib.import_module(
                f"{transfer}.packed_tensor"
            ).packed_nccl_broadcast_producer,
            _HAS_STATEFUL_TRAINER_ENGINE=True,
            _HAS_RESET_PREFIX_CACHE_SUCCESS=True,
        )
    original = client.VLLMClient.init_communicator

    @functools.wraps(original)
    def init_communicator(self: Any, device: Any = 0) -> None:
        original(self, "cuda")

    client.VLLMClient.init_communicator = init_communicator
