"""A test does not change the environment of later ones."""

from __future__ import annotations

import os

import pytest
from support import warm


def test_variables_that_a_library_sets_do_not_reach_later_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forkserver of such a launch would be no fork of the warm launcher. What pytest was started with
    stays.
    """
    monkeypatch.setattr(warm, "AT_START", frozenset({"TORCH_OF_THE_USER"}))
    for name in ("TORCH_OF_THE_USER", "TORCH_OF_A_LIBRARY", "OF_NO_LIBRARY"):
        monkeypatch.setenv(name, "1")
    warm.remove_variables_of_libraries()
    assert {"TORCH_OF_THE_USER", "OF_NO_LIBRARY"} <= os.environ.keys()
    assert "TORCH_OF_A_LIBRARY" not in os.environ
