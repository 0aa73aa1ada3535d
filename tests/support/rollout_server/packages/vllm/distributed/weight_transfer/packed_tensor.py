"""Sends tensors one by one; vLLM packs them into buffers first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


def packed_nccl_broadcast_producer(
    iterator: Iterator[tuple[str, torch.Tensor]],
    group: Any,
    src: int,
    post_iter_func: Callable[[tuple[str, torch.Tensor]], torch.Tensor],
) -> None:
    """Broadcast the tensors of the trainer in their order."""
    for item in iterator:
        tensor = post_iter_func(item).detach().cpu().contiguous()
        group.broadcast(tensor.view(-1).view(torch.uint8), src=src)
