"""`grpo-run top [RUN|DIR] [--once]`: runs and ranks live in the terminal, as over ssh.

A tree of runs and ranks, and what the live page shows of the chosen one. Python stacks of a rank are read on
request, without pausing it.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_run.cli.command_parser import CommandParser
from grpo_run.cli.serve import find, yield_to_training
from grpo_run.watchdog.text import duration_text, size_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from textual.app import App

    from grpo_run.dashboards.live.feed import RunFeed, RunList

POLL_SECONDS = 0.5
LIST_SECONDS = 2.0
LIST_READ_SECONDS = 0.2
STACK_SECONDS = 10.0
ONCE_WIDTH = 80
CURVES = ("reward", "completion_length", "kl", "loss")
BLOCKS = "▁▂▃▄▅▆▇█"
NARROW = 110
"""Below so many columns, the runs are above the chosen one, so that their names have room."""
LIST_COLUMNS = 36
HELP = """\
up, down     choose a run, or a rank of the chosen run
enter        fold or unfold the ranks of a run
s            read the Python stacks of the chosen rank, without pausing it
tab          go to the run's page, which up and down then scroll, and back
h, ?         this help
escape       the run again
q            quit; the run goes on

! before a rank: the others wait for it
late         how much later than the first rank this one ends its steps
limit        most memory that the rank, or its device, may use

What the ranks print: grpo-run logs -f. As a page: grpo-run serve."""
STYLES = {"good": "green", "bad": "bold red", "warn": "yellow", "busy": "magenta", "quiet": "dim"}


def main(arguments: Sequence[str]) -> int:
    """Show until `q`; returns 0."""
    parser = CommandParser(
        prog="grpo-run top",
        description="Show runs and ranks live in the terminal.",
        epilog="Keys: arrows choose a run or rank, s reads the stacks of the chosen rank, h helps, q quits.",
    )
    parser.add_run("run directory, run id or folder of runs")
    parser.add_argument(
        "--once", action="store_true", help="print one frame and exit, as into a pipe or file"
    )
    options = parser.parse_args(arguments)

    from grpo_run.dashboards.live.feed import RunFeed, RunList, key_of

    root, run, _ = find(options.run)
    if options.once or not sys.stdout.isatty():
        feed = RunFeed(run)
        feed.read()
        print_once(feed.shown)
        return 0
    yield_to_training()
    make_app(RunList(root, run), key_of(run.path), RunFeed(run)).run()
    return 0


def print_once(shown: Mapping[str, Any]) -> None:
    """Print one frame, as wide as the terminal."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else ONCE_WIDTH)
    console.print(frame(shown, console.width))


def frame(shown: Mapping[str, Any], width: int) -> RenderableType:
    """Return what is shown of a run.

    Args:
        shown: as `RunFeed.shown`; its texts have no control characters.
        width: in columns.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    run = shown.get("run")
    if run is None:
        return Text(shown.get("problem", "Reading the run"))
    style = STYLES[run["tone"]]
    parts: list[RenderableType] = [
        Text(run["sentence"], style=style),
        *([Text(run["also"], style="dim")] if run["also"] else []),
        *([Text(run["trouble"], style="yellow")] if run["trouble"] else []),
        Text(),
    ]
    facts = Table.grid(padding=(0, 2))
    target = f" of {run['target_steps']}" if run["target_steps"] else ""
    points = shown.get("curves", {}).get("points", {})
    rows = [
        ("step", f"{run['step']}{target}" if run["counts_steps"] else "not counted"),
        ("time left", _or(run["remaining_seconds"], duration_text)),
        ("per step", _or(run["step_seconds"], lambda seconds: f"{seconds:.2f} s")),
        ("goodput", _or(run["goodput"], lambda value: f"{value:.1%}")),
        *(
            (name.replace("_", " "), f"{curve[-1][1]:<9.4g}{sparkline(curve, max(8, width - 40))}")
            for name in CURVES
            if (curve := points.get(name))
        ),
        *(
            ("checkpoint", f"step {one['step']}, {duration_text(max(0, time.time() - one['at']))} ago")
            for one in run["checkpoints"][-1:]
        ),
    ]
    for name, value in rows:
        facts.add_row(Text(name, style="dim"), value)
    parts.append(facts)
    if run["ranks"]:
        ranks = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=False)
        for title in ("rank", "step", "phase", "for", "late", "memory", "limit"):
            ranks.add_column(title, justify="left" if title == "phase" else "right")
        for one in run["ranks"]:
            ranks.add_row(*_rank_cells(one), style="bold red" if one.get("awaited") else "")
        parts += [Text(), ranks]
    parts += [Text(line) for line in run["hosts"]]
    for one in run["incidents"][:5]:
        ended = _or(one["recovery_seconds"], lambda seconds: f"recovered in {seconds:.1f} s", "not recovered")
        parts += [Text(), Text(f"{one['number']}. {one['sentence']}"), Text(f"   {ended}", style="dim")]
    return Group(*parts)


def _rank_cells(rank: Mapping[str, Any]) -> list[str]:
    if not rank["observable"]:
        return [f"local {rank['local_rank']}", "", rank["phase"], "", "", "", ""]
    late, memory = rank["late_seconds"], rank["memory"] or {}
    return [
        str(rank["rank"]),
        str(rank["step"]),
        rank["phase"] + (", waits" if rank["waits"] else ""),
        _or(rank["phase_seconds"], duration_text),
        "behind" if late is None else f"+{late:.2f} s",
        _or(memory.get("now_bytes"), size_text),
        _or(memory.get("capacity_bytes"), size_text),
    ]


def _or(value: Any, text: Any, missing: str = "–") -> str:
    return missing if value is None else str(text(value))


def sparkline(points: Sequence[Sequence[float]], width: int) -> str:
    """Return the means of a curve as one line of blocks, at most `width` of them."""
    values = [point[1] for point in points]
    groups = [values[len(values) * at // width : len(values) * (at + 1) // width] for at in range(width)]
    means = [sum(group) / len(group) for group in groups if group]
    low, high = min(means), max(means)
    return "".join(BLOCKS[round((mean - low) / (high - low or 1) * (len(BLOCKS) - 1))] for mean in means)


def stacks_of(pid: int) -> str:
    """Return the Python stacks of a process, read without pausing it, and what reading has cost."""
    from grpo_run.dashboards.clean_text import clean
    from grpo_run.watchdog.evidence.stack_capture import dump

    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="grpo-run-") as folder:
        file = Path(folder) / "stacks"
        problem = dump(pid, file, False, STACK_SECONDS)
        text = problem or file.read_text(errors="replace")
    spent = time.monotonic() - began
    cost = f"py-spy took {spent:.2f} s; the process was not paused, so a stack that changed may be wrong"
    return f"{cost}\n\n{clean(text, 100_000)}"


def make_app(runs: RunList, key: str, feed: RunFeed) -> App[None]:
    """Return the application.

    Args:
        key: of the run that is chosen first.
        feed: of that run.
    """
    from rich.text import Text
    from textual import work
    from textual.app import App, ComposeResult
    from textual.containers import Horizontal, VerticalScroll
    from textual.widgets import Footer, Static, Tree
    from textual.widgets.tree import TreeNode

    from grpo_run.dashboards.live.feed import RunFeed

    class Top(App[None]):
        """The tree on the left, the chosen run on the right; both are refreshed by one thread."""

        CSS = f"""
        Tree {{ width: {LIST_COLUMNS}; border-right: solid $primary-darken-2; }}
        #detail {{ padding: 0 1; }}
        .narrow {{ layout: vertical; }}
        .narrow Tree {{
            width: 100%; height: auto; max-height: 7;
            border-right: none; border-bottom: solid $primary-darken-2;
        }}
        """
        BINDINGS = [  # noqa: RUF012
            ("q", "quit", "quit"), ("s", "stacks", "stacks of the rank"), ("h,question_mark", "help", "help"),
            ("escape", "run", "back"),
        ]  # fmt: skip
        ENABLE_COMMAND_PALETTE = False

        def compose(self) -> ComposeResult:
            yield Horizontal(Tree[Any]("runs"), VerticalScroll(Static(id="detail")), id="body")
            yield Footer()

        def on_mount(self) -> None:
            self.feeds, self.chosen, self.rank, self.stacks = {key: feed}, key, -1, ""
            self.nodes: dict[str, TreeNode[Any]] = {}
            tree = self.query_one(Tree)
            tree.show_root = False
            tree.root.expand()
            tree.focus()
            self.refresh_runs()

        def on_resize(self) -> None:
            """Put the runs where there is room."""
            self.query_one("#body").set_class(self.size.width < NARROW, "narrow")

        @work(thread=True, exclusive=True)
        def refresh_runs(self) -> None:
            """Read the chosen run and the list, again and again."""
            listed_at = -1.0
            while self.is_running:
                if time.monotonic() - listed_at > LIST_SECONDS:
                    runs.find()
                    listed_at = time.monotonic()
                directory = runs.directories.get(self.chosen)
                if self.chosen not in self.feeds and directory is not None:
                    self.feeds = {self.chosen: RunFeed(directory)}
                if self.chosen in self.feeds:
                    self.feeds[self.chosen].read()
                run = self.latest().get("run")
                runs.read({} if run is None else {self.chosen: run}, LIST_READ_SECONDS)
                self.call_from_thread(self.show)
                time.sleep(POLL_SECONDS)

        def latest(self) -> Mapping[str, Any]:
            """What was read last of the chosen run."""
            return self.feeds[self.chosen].shown if self.chosen in self.feeds else {}

        def show(self) -> None:
            """Draw what was read last."""
            tree: Tree[Any] = self.query_one(Tree)
            shown, listed = self.latest(), runs.shown()
            for gone in set(self.nodes) - {one["key"] for one in listed}:
                self.nodes.pop(gone).remove()
            for one in listed:
                label = Text.assemble(one["run_id"], (f" {one['state'] or ''}", "dim"))
                if one["key"] not in self.nodes:
                    chosen = one["key"] == self.chosen
                    self.nodes[one["key"]] = tree.root.add(label, data=(one["key"], -1), expand=chosen)
                    if chosen:
                        self.call_after_refresh(tree.move_cursor, self.nodes[one["key"]])
                node = self.nodes[one["key"]]
                node.set_label(label)
                ranks = shown.get("run", {}).get("ranks", []) if one["key"] == self.chosen else []
                if len(node.children) != len(ranks):
                    node.remove_children()
                    for rank in ranks:
                        node.add_leaf("", data=(one["key"], rank["local_rank"]))
                for leaf, rank in zip(node.children, ranks, strict=True):
                    mark = ("! " if rank.get("awaited") else "") + rank["phase"]
                    leaf.set_label(Text(f"{rank.get('rank', rank['local_rank'])} {mark}"))
            detail = self.query_one("#detail", Static)
            if self.stacks:
                detail.update(Text(self.stacks))
            else:
                width = self.size.width
                detail.update(frame(shown, width - (4 if width < NARROW else LIST_COLUMNS + 4)))

        def on_tree_node_highlighted(self, event: Tree.NodeHighlighted[Any]) -> None:
            """Choose a run or rank."""
            if event.node.data is not None and event.node.data != (self.chosen, self.rank):
                self.chosen, self.rank = event.node.data
                self.stacks = ""

        def action_stacks(self) -> None:
            """Read the stacks of the chosen rank, on this machine."""
            ranks = self.latest().get("run", {}).get("ranks", [])
            found = next((one for one in ranks if one["local_rank"] == self.rank and one["observable"]), None)
            if found is None:
                self.notify("choose a rank of a run that is running")
            else:
                self.stacks = "reading"
                self.read_stacks(found["pid"])

        @work(thread=True, group="stacks")
        def read_stacks(self, pid: int) -> None:
            """Wait for py-spy in a thread of its own."""
            self.stacks = stacks_of(pid)

        def action_help(self) -> None:
            """Show the keys in place of the run."""
            self.stacks = HELP

        def action_run(self) -> None:
            """Show the run again."""
            self.stacks = ""

    return Top()
