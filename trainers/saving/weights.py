"""Detect non-finite weights, which are never saved. Called by `saver.py` before every save."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from grpo_run.trainers.upstream import tensor_files


def has_non_finite_weights(parameters: Iterable[Any]) -> bool:
    """Whether a trained weight on this rank is NaN or infinite. Reads each weight once.

    The logged loss does not show it: transformers logs a NaN loss as 0.0 (`logging_nan_inf_filter`).
    """
    by_device: dict[Any, list[torch.Tensor]] = {}
    for parameter in parameters:
        if not parameter.requires_grad:
            continue  # unchanged since it was loaded
        local = tensor_files.local_part(parameter)
        if local.numel() and local.is_floating_point():
            if local.element_size() == 1:
                local = local.float()  # torch defines no norm for 8-bit types
            by_device.setdefault((local.device, local.dtype), []).append(local)
    with torch.no_grad():
        # the maximum norm cannot overflow, and is finite exactly if every value is
        return not all(
            bool(torch.nn.utils.get_total_norm(group, norm_type=float("inf")).isfinite())
            for group in by_device.values()
        )
