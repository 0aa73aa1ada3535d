"""Write the table of failures in docs/reference/lifecycle.md from real launches; run by hand.

Each row is a way to fail, the exit code, and the last line that the terminal has shown. A test makes the same
launches and compares.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from support import warm
from support.runs import BIN, SCRIPTS
from support.warm import QUIET

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "lifecycle.md"
BEGIN, END = "<!-- last lines -->\n", "<!-- end: last lines -->\n"
SECONDS = 120.0
FILES = {
    "train.py": "print('trained')\n",
    "syntax.py": "import os\n\ndef f(:\n    pass\n",
    "broken/__init__.py": "",
    "broken/__main__.py": "x = (\n",
    "config.yaml": "lr: [1\nsteps: 2\n",
}
BEFORE: Mapping[str, tuple[str, ...]] = {
    "the script is missing": ("missing.py",),
    "the script has a syntax error": ("syntax.py",),
    "the module is missing": ("-m", "no_such_module"),
    "the module has a syntax error": ("-m", "broken"),
    "a YAML file of the script cannot be parsed": ("train.py", "--config", "config.yaml"),
    "an accelerate configuration cannot be parsed": ("--accelerate-config", "config.yaml", "train.py"),
    "an option is misspelled": ("--nproc_per_nod", "2", "train.py"),
    "an option of `accelerate launch`": ("--num_processes", "2", "train.py"),
    "no such checkpoint to resume from": ("--resume-from", "out/checkpoint-7", "train.py"),
    "the run directory cannot be written": ("--run-dir", "/proc/nope", "train.py"),
    "no such fault to inject": ("--inject", "foo@rank0:step1", "train.py"),
    "the output directory cannot be written": ("train.py", "--output_dir", "/proc/nope/out"),
    "a wrong address": ("--metrics-addr", "127.0.0.1:80000", "train.py"),
}
AT_START = (
    "a package is missing", "an exception", 'sys.exit("text")', "sys.exit(3)", "os._exit(1)", "SIGKILL",
    "a segmentation fault", "abort()", "no memory of the host", "endless recursion",
    "a directory that cannot be written", "too many open files", "KeyboardInterrupt in the script",
    "wrong arguments",
)  # fmt: skip
IN_TRAINING = (
    "an exception", 'sys.exit("text")', "os._exit(1)", "SIGKILL", "a data loader's worker is killed",
)  # fmt: skip
AFTER_TRAINING = ("an exception", 'sys.exit("text")', "os._exit(1)", "a segmentation fault")
GROUPS = {
    "before": tuple(BEFORE), "at start": AT_START, "in training": IN_TRAINING,
    "after training": AFTER_TRAINING,
}  # fmt: skip


def row(folder: Path, when: str, way: str) -> str:
    """Launch what fails in this way, and return its row."""
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    own = BEFORE[way] if when == "before" else (str(SCRIPTS / "failing.py"), when, way)
    words = [str(BIN / "grpo-run"), "launch", "--metrics-addr", "off", *own]
    if when == "at start":
        words.insert(2, "--no-preload")
    environment = {**os.environ, **QUIET, "XDG_STATE_HOME": str(folder / "state")}
    code, printed = warm.run(words, cwd=folder, environment=environment, timeout_seconds=SECONDS)
    lines = [line for line in printed.splitlines() if "grpo-run: " in line]
    said = plain(lines[-1].partition("grpo-run: ")[2], folder) if lines else ""
    return f"| {when} | {way} | {code} | {said} |"


def plain(line: str, folder: Path) -> str:
    """Return a line without what differs between two launches."""
    line = line.replace(f"{os.path.realpath(folder)}/", "").replace(f"{folder}/", "").replace("|", "\\|")
    line = line.replace(f"{SCRIPTS}/", "")
    line = re.sub(r"\(pid\(?s?\)? ?\d+\)|pid\(s\) \d+|pid \d+", "pid N", line)
    return re.sub(r"failing-[0-9a-f]{6}", "failing-1f0c2a", line)


def rows_of_page() -> list[str]:
    """Return the rows that the page has."""
    text = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    return [line for line in text.splitlines() if line.startswith("| ")][1:]


def main() -> None:
    """Launch all of them, and write the table."""
    found = []
    for when, ways in GROUPS.items():
        for way in ways:
            with tempfile.TemporaryDirectory() as folder:
                found.append(row(Path(folder), when, way))
                print(found[-1], flush=True)
    head, _, rest = PAGE.read_text().partition(BEGIN)
    table = "\n".join(["| when | what fails | code | last line |", "|---|---|---|---|", *found])
    PAGE.write_text(f"{head}{BEGIN}\n{table}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
