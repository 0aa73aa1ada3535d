"""torchrun's options: their declaration, and what becomes of those that do not mean the same here.

Every option of torchrun is honoured or refused in one line, which a contract test asks of each option of the
installed torch; docs/reference/torchrun.md is generated from the tables. Declared again so that help and a
wrong option are answered without importing torch. `options.py` adds them to the parser, `command.py` asks for
what is here, and `_ranks.py` passes the rest to torch elastic. Starts no rank.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Callable
from typing import Any

from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.processes.starting import interpreter_command

Row = tuple[tuple[str, ...], Any, Callable[[str], Any], str]
MONITOR_INTERVAL_SECONDS = 0.3
"""Time between two polls of the ranks, a third as often as torchrun. Exits are noticed at once all the same,
and ranks that may be deadlocked are polled when it is time to."""
SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""From which torch takes the default of `--shutdown-timeout`."""
LOGS = "each rank's output is in attempts/NNN/rankN.log of the run directory"
REFUSALS = {
    "no_python": "a rank must be a Python script or module; start the program from a script",
    "run_path": "a rank must be a Python script or module; leave the option out, or use -m",
    "log_dir": f"{LOGS}; choose that with --run-dir",
    "duplicate_stdout_filters": f"{LOGS}; search it there, and leave the option out",
    "duplicate_stderr_filters": f"{LOGS}; search it there, and leave the option out",
    "logs_specs": f"{LOGS}, whose format is fixed; leave the option out",
}
"""Why an option is refused and what to do, by destination. Their defaults are false."""
NUMA_SECONDS = 120.0
"""How long the process that asks for the CPUs near the GPUs may take; it imports torch."""


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
    (("--start-method",), "spawn", str, "of functions, which torchrun cannot start: no effect, as there"),
    (("--event-log-handler",), "null", str, "where torch elastic records the events of ranks: null, console"),
    (("--role",), "default", str, "role of the ranks"),
    (("--log-dir",), None, str, "refused"),
    (("-r", "--redirects"), "0", str, "local ranks whose output is not shown: 3, or RANK:3,..."),
    (("-t", "--tee"), "0", str, "local ranks whose output is shown; a file has it always"),
    (("--local-ranks-filter",), "", str, "local ranks whose output is shown"),
    (("--duplicate-stdout-filters",), [], _words, "refused"),
    (("--duplicate-stderr-filters",), [], _words, "refused"),
    (("--node-rank",), 0, int, "rank of this node in a static rendezvous"),
    (("--master-addr",), "127.0.0.1", str, "address of node 0 in a static rendezvous"),
    (("--master-port",), None, int, "port of node 0 in a static rendezvous"),
    (("--local-addr",), None, str, "address of this node"),
    (("--logs-specs",), None, str, "refused"),
    (("--numa-binding",), None, str, "bind ranks to CPUs near their GPUs, as torch chooses them"),
    (("--signals-to-handle",), "SIGTERM,SIGINT,SIGHUP,SIGQUIT", str, "signals that end the run"),
    (
        ("--shutdown-timeout",),
        None,
        int,
        "seconds that a script with no Trainer and no loop has after SIGTERM; --stop-timeout sets this too",
    ),
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


def add_torchruns(group: argparse._ArgumentGroup) -> None:
    """Declare torchrun's options and the script. A variable `PET_<NAME>` sets a default, as for torchrun."""
    for names, default, kind, text in OPTIONS:
        name = destination(names)
        if name not in WITHOUT_VARIABLE:
            default = os.environ.get(f"PET_{name.upper()}", default)
        group.add_argument(
            *_spellings(names), default=default, type=kind, choices=CHOICES.get(names[-1]), help=text
        )
    for names, text in SWITCHES:
        given = bool(int(os.environ.get(f"PET_{destination(names).upper()}", "0")))
        group.add_argument(*_spellings(names), action="store_true", default=given, help=text)
    group.add_argument("training_script", help="script or module that each rank runs")
    group.add_argument("training_script_args", nargs=argparse.REMAINDER, help="its arguments")


def destination(names: tuple[str, ...]) -> str:
    """Return the name of an option's value, as argparse makes it."""
    return names[-1][2:].replace("-", "_")


def _spellings(names: tuple[str, ...]) -> list[str]:
    """With underscores too, as torchrun accepts them."""
    other = f"--{destination(names)}"
    return [*names, *([other] if other not in names else [])]


def check_torchruns(options: argparse.Namespace) -> None:
    """Refuse what is not supported.

    Raises:
        UsageError: an option, or a variable `PET_<NAME>`, asks for it.
    """
    for name, reason in REFUSALS.items():
        if getattr(options, name):
            raise UsageError(f"--{name.replace('_', '-')} is not supported: {reason}")


def handler_seconds(options: argparse.Namespace) -> float | None:
    """Return `--shutdown-timeout` in seconds, or that of torch's variable; None for the default.

    Raises:
        UsageError: it is not a number above 0.
    """
    text = options.shutdown_timeout
    text = os.environ.get(SHUTDOWN_VARIABLE) if text is None else str(text)
    if text is not None and not (text.isdecimal() and int(text) > 0):
        raise UsageError(f"--shutdown-timeout {text}: must be a number of seconds above 0")
    return None if text is None else float(text)


def shown_local_ranks(options: argparse.Namespace, ranks: int) -> frozenset[int] | None:
    """Return the local ranks that torchrun would show on the console; None if no option asks for it.

    Args:
        ranks: number of ranks per node.

    Raises:
        UsageError: a value is wrong, asks to hide one of the two streams, or contradicts `--show-ranks`.
    """
    from torch.distributed.elastic.multiprocessing import Std, to_map

    defaults = {"local_ranks_filter": "", "redirects": "0", "tee": "0"}
    given = [name for name, default in defaults.items() if getattr(options, name) != default]
    if not given:
        return None
    flag = f"--{given[0].replace('_', '-')}"
    if options.show_ranks is not None:
        raise UsageError(f"{flag} and --show-ranks both say which ranks are shown; give one of them")
    try:
        tee, redirects = (to_map(Std.from_str(text), ranks) for text in (options.tee, options.redirects))
        words = options.local_ranks_filter.split(",") if options.local_ranks_filter else range(ranks)
        filtered = frozenset(map(int, words))
    except (ValueError, KeyError):
        raise UsageError(f"{flag} {getattr(options, given[0])}: not what torchrun accepts") from None
    hidden = {rank: redirects[rank] & ~tee[rank] for rank in range(ranks)}
    if partly := [rank for rank, streams in hidden.items() if streams in (Std.OUT, Std.ERR)]:
        raise UsageError(
            f"--redirects {options.redirects}: one of two streams of rank {partly[0]} cannot be hidden; use 3"
        )
    return frozenset(rank for rank in filtered if rank in hidden and not hidden[rank])


def numa_cpus(options: argparse.Namespace, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the CPUs of each local rank that `--numa-binding` asks for; empty without the option.

    torch is asked in a process of its own, because it opens the GPUs for the answer.

    Raises:
        UsageError: torch cannot tell them: there is no GPU, or no `numactl`.
    """
    if options.numa_binding is None:
        return ()
    command = interpreter_command("grpo_run.runtime.upstream.torch_names:print_numa_cpus")
    words = [*command, options.numa_binding, str(ranks)]
    try:
        ran = subprocess.run(words, check=True, capture_output=True, text=True, timeout=NUMA_SECONDS)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [str(error)]
        raise UsageError(
            f"--numa-binding {options.numa_binding}: {lines[-1]}; leave the option out"
        ) from None
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"--numa-binding {options.numa_binding}: torch has not answered within {NUMA_SECONDS:g} s; leave"
            " the option out"
        ) from None
    return tuple(tuple(cpus) for cpus in json.loads(ran.stdout.splitlines()[-1]))
