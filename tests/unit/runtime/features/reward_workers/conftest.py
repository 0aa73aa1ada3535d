"""Resolve the files of modules once: these tests load thousands, and every function asks for all of them."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _resolved_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os.path, "realpath", functools.cache(os.path.realpath))
        yield
