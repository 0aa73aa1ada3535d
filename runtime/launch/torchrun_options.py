"""torchrun's options, declared again so that `--help` and a wrong option are answered without importing torch.

Used by `cli.launch_options`. A contract test compares them with torch's own parser; `cli/launching/elastic.py` adds what a newer
torch has.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

Row = tuple[tuple[str, ...], Any, Callable[[str], Any], str]
MONITOR_INTERVAL_SECONDS = 0.3
"""Time between two polls of the ranks, a third as often as torchrun. Exits are noticed at once all the same, and ranks
that may be deadlocked are polled when it is time to."""


def _words(text: str) -> list[str]:
    """Split at commas; two of them are one."""
    return [word.replace("\0", ",") for word in text.replace(",,", "\0").split(",")]


OPTIONS: tuple[Row, ...] = (
    (("--nnodes",), "1:1", str, "number of nodes, or MIN:MAX"),
    (("--nproc-per-node",), None, str, "ranks per node: a number, auto, cpu, gpu or xpu"),
    (("--rdzv-backend",), "static", str, "backend of the rendezvous"),
    (("--rdzv-endpoint",), "", str, "HOST:PORT of the rendezvous"),
    (("--rdzv-id",), "none", str, "id of the rendezvous, equal on all nodes"),
    (("--rdzv-conf",), "", str, "configuration of the rendezvous: KEY=VALUE,..."),
    (("--max-restarts",), None, int, "failures in a row without a newer checkpoint before the run ends"),
    (("--monitor-interval",), MONITOR_INTERVAL_SECONDS, float, "seconds between two polls of the ranks"),
    (("--start-method",), "spawn", str, "ignored"),
    (("--event-log-handler",), "null", str, "without effect"),
    (("--role",), "default", str, "role of the ranks"),
    (("--log-dir",), None, str, "ignored"),
    (("-r", "--redirects"), "0", str, "ignored"),
    (("-t", "--tee"), "0", str, "ignored"),
    (("--local-ranks-filter",), "", str, "without effect; see --show-ranks"),
    (("--duplicate-stdout-filters",), [], _words, "without effect"),
    (("--duplicate-stderr-filters",), [], _words, "without effect"),
    (("--node-rank",), 0, int, "rank of this node in a static rendezvous"),
    (("--master-addr",), "127.0.0.1", str, "address of node 0 in a static rendezvous"),
    (("--master-port",), None, int, "port of node 0 in a static rendezvous"),
    (("--local-addr",), None, str, "address of this node"),
    (("--logs-specs",), None, str, "without effect"),
    (("--numa-binding",), None, str, "without effect"),
    (("--signals-to-handle",), "SIGTERM,SIGINT,SIGHUP,SIGQUIT", str, "signals that end the run"),
    (("--shutdown-timeout",), None, int, "without effect"),
)
SWITCHES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("--standalone",), "a rendezvous of its own on a free port; the default on one node"),
    (("-m", "--module"), "the script is a module, as in `python -m`"),
    (("--no-python",), "refused"),
    (("--run-path",), "refused"),
    (("--virtual-local-rank",), "LOCAL_RANK is 0 and one GPU is visible in every rank"),
)
CHOICES = {
    "--start-method": ["spawn", "fork", "forkserver"],
    "--numa-binding": ["node", "socket", "exclusive", "core-complex"],
}
WITHOUT_VARIABLE = frozenset({"logs_specs", "numa_binding"})
"""Options that torchrun does not take from a variable."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare torchrun's options and the script. A variable `PET_<NAME>` sets a default, as for torchrun."""
    for names, default, kind, help_text in OPTIONS:
        name = names[-1][2:].replace("-", "_")
        if name not in WITHOUT_VARIABLE:
            default = os.environ.get(f"PET_{name.upper()}", default)
        parser.add_argument(
            *_spellings(names), default=default, type=kind, choices=CHOICES.get(names[-1]), help=help_text
        )
    for names, help_text in SWITCHES:
        given = bool(int(os.environ.get(f"PET_{names[-1][2:].replace('-', '_').upper()}", "0")))
        parser.add_argument(*_spellings(names), action="store_true", default=given, help=help_text)
    parser.add_argument("training_script", help="script or module that each rank runs")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="its arguments")


def _spellings(names: tuple[str, ...]) -> list[str]:
    """With underscores too, as torchrun accepts them."""
    other = f"--{names[-1][2:].replace('-', '_')}"
    return [*names, *([other] if other not in names else [])]
