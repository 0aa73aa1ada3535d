"""TRL's own functions that divide a rollout into micro-batches. Used by `exact`, which divides a saved one
again.

TRL has no documentation of them; images of several models are stored by image or by tile, and only these
functions know how.
"""

from __future__ import annotations

from typing import Any

from trl.trainer.utils import split_pixel_values_by_grid, split_tensor_dict, unsplit_pixel_values_by_grid


def split_images(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch whose images are lists with one entry for each row."""
    split: dict[str, Any] = split_pixel_values_by_grid(batch)
    return split


def join_images(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch with its images as the model takes them, the inverse of `split_images`."""
    joined: dict[str, Any] = unsplit_pixel_values_by_grid(batch)
    return joined


def split_rows(batch: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Return `count` batches of consecutive rows."""
    parts: list[dict[str, Any]] = split_tensor_dict(batch, count)
    return parts
