"""Write docs/internals/step.md: what a rank does in one step, as recorded in a real run; run by `make
generated`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from support import warm
from support.runs import BIN

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "internals" / "step.md"
SCRIPT = REPOSITORY / "tests" / "scripts" / "recorded_step.py"
OPTIONS = ("--snapshot-every", "1", "--generation", "repetition=16")
BEGIN, END = "<!-- generated: step -->", "<!-- end: step -->"
EVENTS = {
    "StepEvents.step_begins": "transformers has read the batches of the step",
    "StepEvents.optimizer_begins": "the gradient is complete",
    "StepEvents.step_ends": "the optimizer has taken its step",
    "StepEvents.checkpoint": "transformers has logged, evaluated and saved",
}
"""The events of a step, and when a Trainer reaches them."""


def record(folder: Path, form: str = "trainer", ranks: int = 2) -> list[dict[str, Any]]:
    """Train a few steps under `grpo-run launch`, and return the calls of the third."""
    command = [
        str(BIN / "grpo-run"), "launch", "--nproc-per-node", str(ranks),
        "--run-dir", str(folder / "run"), "--metrics-addr", "off", *OPTIONS,
        str(SCRIPT), "--form", form, "--output-dir", str(folder / "out"), "--max-steps", "5", "--cpu",
    ]  # fmt: skip
    code, printed = warm.run(command, cwd=folder, timeout_seconds=240)
    assert code == 0, printed
    found: list[dict[str, Any]] = json.loads((folder / "out" / "calls.json").read_text())
    return found


def table(calls: list[dict[str, Any]]) -> str:
    """Return the calls as a Markdown table, in order."""
    lines = ["| | called | what it does | where |", "|---|---|---|---|"]
    number, seen = 0, set[tuple[str, str]]()
    for call in calls:
        name, phase = call["name"], call.get("phase")
        if call["kind"] == "event" and name in EVENTS:
            lines.append(f"| | **{EVENTS[name]}**: `{name}` | {call['summary']} | `{call['module']}` |")
            seen.clear()
            continue
        key = name, call["method"] + (phase or "")
        if key in seen:  # once for each micro-batch
            continue
        seen.add(key)
        number += 1
        around = f"around the trainer's `{call['method']}`: " if call["method"] else ""
        shown = f" ({phase})" if phase else ""
        lines.append(f"| {number} | {around}`{name}`{shown} | {call['summary']} | `{call['module']}` |")
    return "\n".join(lines)


def page(text: str, calls: list[dict[str, Any]]) -> str:
    """Return the page with the recorded calls."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table(calls)}\n\n{END}{after}"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        calls = record(Path(folder))
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), calls), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
