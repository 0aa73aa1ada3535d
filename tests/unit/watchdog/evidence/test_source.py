"""Which files count as the user's, a library's or a framework's."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path

import pytest

from grpo_run.watchdog.evidence import source


@pytest.mark.parametrize(
    ("file", "plain"),
    [
        ("/home/user/train.py", True),
        ("/venv/lib/python3.11/site-packages/trl/trainer/grpo_trainer.py", True),
        ("/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", False),
        ("/venv/lib/python3.11/site-packages/accelerate/utils/operations.py", False),
        ("/usr/lib/python3/dist-packages/torch/nn/modules/module.py", False),
        ("/venv/lib/python3.11/site-packages/typing_extensions.py", False),
        ("/venv/lib/python3.11/site-packages/torch_users_library/main.py", True),
        ("<frozen importlib._bootstrap>", False),
        (contextlib.__file__, False),
        (source.__file__, False),
        (f"{source.OUR_ROOT}/runtime/features/some/_faults.py", True),
        (f"{source.OUR_ROOT}/trainers_of_mine/train.py", True),
    ],
)
def test_lines_outside_frameworks_are_reported(file: str, plain: bool) -> None:
    """The user's and the trainer's; injected faults count as the user's."""
    assert source.is_outside_frameworks(file) is plain


def test_our_own_lines_are_recognized_through_a_link(tmp_path: Path) -> None:
    """An editable installation is a link, and frames have the link's path."""
    (tmp_path / "linked").symlink_to(Path(source.__file__).resolve().parents[2])
    path = tmp_path / "linked" / "watchdog" / "evidence" / "source.py"
    spec = importlib.util.spec_from_file_location("linked_source", path)
    assert spec is not None
    assert spec.loader is not None
    linked = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(linked)
    assert linked.is_outside_frameworks(str(path)) is False
    assert linked.is_user_file(str(path)) is False


def test_a_library_is_not_the_users_code() -> None:
    """An error raised in a library is located at the user's line that called it."""
    assert source.is_user_file("/home/user/train.py")
    assert not source.is_user_file("pyarrow/error.pxi"), "a compiled extension names its source"
    assert not source.is_outside_frameworks("src/mypackage/_fast.pyx")
    assert not source.is_user_file("/venv/lib/python3.11/site-packages/trl/trainer/grpo_trainer.py")
