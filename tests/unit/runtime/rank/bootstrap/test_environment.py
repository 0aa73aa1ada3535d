"""A script finds what Python would set up for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.builders.trainers.script_runs import Run


def test_a_script_that_returns_exits_with_0(run: Run, session: Any) -> None:
    """No error file is written."""
    assert run("x = 1") == 0
    assert not Path(session.settings.error).exists()


@pytest.mark.parametrize("module", [False, True])
def test_a_script_sees_what_python_would_set_up(run: Run, tmp_path: Path, module: bool) -> None:
    """Its `__name__`, its arguments, its directory first on `sys.path`, and itself as `__main__`."""
    code = run(
        """
        import json, sys
        import __main__
        from pathlib import Path
        Path(__file__).with_name("seen.json").write_text(json.dumps(
            [__name__, sys.argv[1:], sys.path[0], sys.argv[0], getattr(__main__, "marker", None) or "unset"]
        ))
        """,
        "--lr", "1e-6", "", module=module,
    )  # fmt: skip
    assert code == 0
    name, arguments, folder, argv0, _ = json.loads((tmp_path / "seen.json").read_text())
    assert (name, arguments) == ("__main__", ["--lr", "1e-6", ""])
    assert Path(folder).resolve() == tmp_path.resolve()
    assert Path(argv0).name == "train.py"


def test_a_script_is_compiled_without_future_imports(run: Run, tmp_path: Path) -> None:
    """The bootstrap's own `from __future__` does not apply: annotations are evaluated."""
    code = run(
        """
        from pathlib import Path
        class Arguments:
            steps: int = 1
        Path(__file__).with_name("seen.txt").write_text(repr(Arguments.__annotations__))
        """
    )
    assert code == 0
    assert (tmp_path / "seen.txt").read_text() == "{'steps': <class 'int'>}"
