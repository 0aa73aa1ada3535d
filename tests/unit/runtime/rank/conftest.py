"""Fixtures: the user's requests, and the exact state of `train()` calls."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.exact import Begun

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.rank.step.step_vote import UserRequests


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> None:
    """Exclude what libraries have created since from the collections that these tests force."""
    gc.freeze()


@pytest.fixture
def requests(board: Board) -> UserRequests:
    """The user's requests on the board."""
    return UserRequests(board)


@pytest.fixture
def begin() -> Begun:
    """Begin the exact state of `train()` calls."""
    return Begun()


@pytest.fixture
def warned(begin: Begun) -> list[str]:
    """Warnings that the user was shown."""
    return begin.warned


@pytest.fixture
def again(begin: Begun, tmp_path: Path) -> Callable[..., Any]:
    """Save one trainer's state to a checkpoint and restore it into another trainer."""
    return functools.partial(begin.again, folder=tmp_path)
