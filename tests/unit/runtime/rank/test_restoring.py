"""A rank gives its script the inherited modules only if the script would import the same; otherwise it starts
over.

Each case is a program of its own: it imports two libraries in advance, hides them, changes something as a
    script would,
and imports them again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
sys.path.insert(0, os.environ["BASE"])
from grpo_run.runtime.rank import inherited_modules as imported
from grpo_run.runtime.rank.inherited_modules import InheritedModules
import wrapt

def first(): import base_lib
def second():
    import user_lib.deep
    try: import optional_lib
    except ImportError: pass

imported.import_in_advance((first, second), list(sys.path))
made = imported.current()
if made.failure: print("failed:", made.failure); sys.exit()
real = sys.modules["user_lib"]
class Over(Exception): pass
def start_over(reason): raise Over(reason)
inherited = InheritedModules(made, start_over=start_over, warn=lambda text: print("warned:", text))
inherited.hide()
wrapt.register_post_import_hook(lambda module: print("hook:", module.__name__), "user_lib.deep")
assert "user_lib" not in sys.modules and "user_lib.deep" not in sys.modules
try:
    exec(os.environ["SCRIPT"])
    import user_lib.deep
    import user_lib as again
    assert again is real and again.__spec__.loader is not inherited and again.deep is sys.modules["user_lib.deep"]
    assert again.runs == 1 and inherited not in sys.meta_path
    print("same")
except Over as reason:
    print("over:", reason)
"""  # noqa: E501


def outcome(tmp_path: Path, script: str, **environment: str) -> list[str]:
    """Run the program with this beginning of a script; return what it printed."""
    files = {
        "base/base_lib.py": "",
        "base/user_lib/__init__.py": "import base_lib\nruns = globals().get('runs', 0) + 1\n",
        "base/user_lib/deep.py": "import os\nexec(os.environ.get('BREAK', ''))\n",
        "new/user_lib.py": "",
        "late/optional_lib.py": "",
        "plain/base_lib/data.txt": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env={**os.environ, "BASE": str(tmp_path / "base"), "SCRIPT": script, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "script",
    [
        "",
        "import base_lib",
        "sys.path.insert(0, 'plain')",
        (
            "from importlib import util; assert util.find_spec('user_lib').origin.endswith('__init__.py');"
            " sys.path.append('new'); os.environ['MY_SETTING'] = '1'; os.environ['PYTHONHASHSEED'] = '0'"
        ),
        (
            "import base_lib; import threading; t = threading.Thread(target=__import__, args=('user_lib',));"
            " t.start(); t.join()"
        ),
    ],
)
def test_a_script_that_would_import_the_same_gets_the_inherited_modules(tmp_path: Path, script: str) -> None:
    """The very objects, with their attributes; hooks that wait for one of them are called once."""
    assert outcome(tmp_path, script) == ["hook: user_lib.deep", "same"]


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("import base_lib; sys.path[:0] = ['ne' + 'w']", "would import user_lib from"),
        ("import site; site.addsitedir('late')", "would import optional_lib from"),
        ("os.environ['OMP_NUM_THREADS'] = '77'", "sets OMP_NUM_THREADS"),
    ],
)
def test_a_script_that_would_import_other_code_starts_over(tmp_path: Path, script: str, why: str) -> None:
    """Whatever way it changed its import path or its environment, also after it imported another library."""
    last = outcome(tmp_path, script)[-1]
    assert last.startswith("over:")
    assert why in last


def test_an_import_that_raises_is_recorded(tmp_path: Path) -> None:
    """Whatever it raises; the rank then starts as a fresh interpreter."""
    (line,) = outcome(tmp_path, "", BREAK="raise SystemExit(3)")
    assert line.startswith("failed: a library could not be imported in advance (")
