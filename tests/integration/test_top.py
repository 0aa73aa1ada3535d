"""`grpo-run top` in a real terminal of 80 columns, beside a real run."""

from __future__ import annotations

from pathlib import Path

from support.runs import BIN, SCRIPTS, Runs
from support.terminals import SECONDS, terminal


def test_a_run_is_followed_in_a_terminal(runs: Runs, tmp_path: Path) -> None:
    """The step advances, the stacks of a rank are read on request, and the run goes on undisturbed."""
    run = runs(
        "--nproc-per-node", "2", str(SCRIPTS / "grpo.py"), "--output-dir", "out", "--max-steps", "400",
        "--step-seconds", "0.1",
    ).start()  # fmt: skip
    run.until_step(2)
    with terminal([str(BIN / "grpo-run"), "top", str(run.directory)], tmp_path) as (screen, process):
        text = screen.wait(lambda text: " of 400" in text and "goodput" in text)
        assert "running" in text
        step = int(text.partition(" of 400")[0].split()[-1])
        screen.wait(lambda text: int(text.partition(" of 400")[0].split()[-1] or 0) > step)
        screen.wait(lambda text: "choose a rank" in text, b"s")
        screen.type(b"\x1b[B")
        screen.wait(lambda text: "py-spy took" in text and "not paused" in text, b"s")
        screen.type(b"q")
        assert process.wait(SECONDS) == 0
    assert run.process.poll() is None


def test_names_are_whole_and_keys_are_explained(runs: Runs, tmp_path: Path) -> None:
    """On 80 columns; the help gives way to the run."""
    name = "grpo-of-a-long-name-with-many-words-0123456789abcdef"
    script = (str(SCRIPTS / "grpo.py"), "--output-dir", "out", "--max-steps", "2")
    run = runs("--run-id", name, *script, name=name).start()
    run.ended()
    with terminal([str(BIN / "grpo-run"), "top", str(run.directory)], tmp_path) as (screen, process):
        text = screen.wait(lambda text: "goodput" in text)
        assert f"{name} finished" in text
        assert "2 of 2" in text
        for key in (b"h", b"?"):
            text = screen.wait(lambda text: "read the Python stacks of the chosen rank" in text, key)
            assert "h, ?         this help" in text
            screen.wait(lambda text: "goodput" in text, b"\x1b")
        screen.type(b"q")
        assert process.wait(SECONDS) == 0
