"""Record a recovery as the picture of README.md.

    .venv/bin/python -P benchmarks/recording.py docs/recovery.svg

Runs `grpo-run launch` with an injected kill in a temporary directory and notes when each line is printed. The
picture shows the lines at these times, start-up shortened; a viewer that does not animate shows all of them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import textwrap
import time
from html import escape
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "grpo.py"
SHOWN = "grpo-run launch --nproc-per-node 2 --snapshot-every 5 --inject kill@rank1:step17 examples/grpo.py"
DEADLINE_SECONDS = 300.0
COLUMNS, LINE_HEIGHT, CHARACTER_WIDTH = 112, 21, 8.43
COLOURS = {"FAULT": "#ff7b72", "RECOVERED": "#7ee787", "Finished": "#7ee787"}


def record() -> list[tuple[float, str]]:
    """Return the lines of a launch with the seconds from its first one."""
    words = [sys.executable, "-m", *("grpo_run" if word == "grpo-run" else word for word in SHOWN.split())]
    words[words.index("examples/grpo.py")] = str(EXAMPLE)
    words[3:4] = ["launch", "--show-ranks", "none"]
    lines: list[tuple[float, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        launch = subprocess.Popen(words, cwd=folder, stderr=subprocess.PIPE, text=True)
        assert launch.stderr is not None
        begin = time.monotonic()
        for line in launch.stderr:
            lines.append((time.monotonic() - begin, line.rstrip().replace(folder, "…")))
        code = launch.wait(timeout=DEADLINE_SECONDS)
    if code != 0 or not any("RECOVERED" in line for _, line in lines):
        raise RuntimeError(f"the run ended with {code}: " + "\n".join(line for _, line in lines))
    first = lines[0][0]
    return [(seconds - first, line) for seconds, line in lines]


def drawing(lines: list[tuple[float, str]]) -> str:
    """Return the terminal as an SVG image, in which each line appears at its time after two seconds."""
    rows = [(0.0, f"$ {SHOWN}")]
    before = shown = 0.0
    for seconds, line in lines:
        shown, before = shown + min(seconds - before, 1.5), seconds
        indent = " " * 9
        wrapped = textwrap.wrap(line, COLUMNS, subsequent_indent=indent, break_on_hyphens=False) or [""]
        rows += [(shown + 1.5, part if number else line[: len(line) - len(line.lstrip())] + part.lstrip())
                 for number, part in enumerate(wrapped)]  # fmt: skip
    texts = []
    for number, (seconds, row) in enumerate(rows):
        colour = next((colour for word, colour in COLOURS.items() if f" {word} " in row), "#e6edf3")
        place = f'x="20" y="{54 + number * LINE_HEIGHT}" fill="{colour}"'
        texts.append(f'<text {place} style="animation-delay:{seconds:.2f}s">{escape(row)}</text>')
    width, height = int(COLUMNS * CHARACTER_WIDTH) + 50, 54 + len(rows) * LINE_HEIGHT
    dots = "".join(f'<circle cx="{22 + 20 * number}" cy="18" r="6" fill="#484f58"/>' for number in range(3))
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    style = (
        "text{font:14px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre;"
        "animation:show .01s both}@keyframes show{from{opacity:0}to{opacity:1}}"
        "@media(prefers-reduced-motion:reduce){text{animation:none}}"
    )
    ground = f'<rect width="{width}" height="{height}" rx="10" fill="#0d1117"/>{dots}'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{style}</style>'
    return "\n".join((head, ground, *texts, "</svg>\n"))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(drawing(record()), encoding="utf-8")
    print(sys.argv[1])
