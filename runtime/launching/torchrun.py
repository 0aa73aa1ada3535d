"""torchrun's options: their declaration, and what becomes of those that do not mean the same here.

Every option of torchrun is honoured or refused in one line, which a contract test asks of each option of the
installed torch; docs/reference/torchrun.md is generated from the declarations. Declared again so that help
and a wrong option are answered without importing torch. `cli/launching/options.py` makes the parser of them,
`_configuration.py` asks for what is here, and `_ranks.py` passes the rest to torch elastic. Starts no rank.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.launch.option import KEY, default_of
from grpo_run.runtime.processes.starting import interpreter_command

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


@dataclass(frozen=True, kw_only=True)
class Declared:
    """How an option of torchrun's is given on the command line.

    Attributes:
        help: what it does.
        kind: type of its value.
        short: another name of it.
        choices: the only values, if they are few.
        has_variable: whether torchrun takes its default from `PET_<NAME>`.
    """

    help: str
    kind: Callable[[str], Any] = str
    short: str = ""
    choices: tuple[str, ...] | None = None
    has_variable: bool = True


def _torchruns(default: Any, help_text: str, kind: Callable[[str], Any] = str, **attributes: Any) -> Any:
    """Declare a field that has torchrun's option of the same name."""
    declared = Declared(help=help_text, kind=kind, **attributes)
    made = {"default_factory": default} if callable(default) else {"default": default}
    return field(**made, metadata={KEY: declared})


@dataclass(frozen=True, kw_only=True)
class TorchrunOptions:
    """torchrun's options, with its defaults where none is said to be ours. A boolean one is a switch."""

    nnodes: str = _torchruns("1:1", "number of nodes, or MIN:MAX")
    nproc_per_node: str | None = _torchruns(None, "ranks per node: a number, auto, cpu, gpu or xpu")
    rdzv_backend: str = _torchruns("static", "backend of the rendezvous")
    rdzv_endpoint: str = _torchruns("", "HOST:PORT of the rendezvous")
    rdzv_id: str = _torchruns("none", "id of the rendezvous, equal on all nodes")
    rdzv_conf: str = _torchruns("", "configuration of the rendezvous: KEY=VALUE,...")
    max_restarts: int | None = _torchruns(
        None, "failures in a row without a newer checkpoint before the run ends", int
    )
    """None for our default, see `Budget`."""
    monitor_interval: float = _torchruns(
        MONITOR_INTERVAL_SECONDS, "seconds between two polls of the ranks", float
    )
    start_method: str = _torchruns(
        "spawn", "of functions, which torchrun cannot start: no effect, as there",
        choices=("spawn", "fork", "forkserver"),
    )  # fmt: skip
    event_log_handler: str = _torchruns(
        "null", "where torch elastic records the events of ranks: null, console"
    )
    role: str = _torchruns("default", "role of the ranks")
    log_dir: str | None = _torchruns(None, "refused")
    redirects: str = _torchruns("0", "local ranks whose output is not shown: 3, or RANK:3,...", short="-r")
    tee: str = _torchruns("0", "local ranks whose output is shown; a file has it always", short="-t")
    local_ranks_filter: str = _torchruns("", "local ranks whose output is shown")
    duplicate_stdout_filters: list[str] = _torchruns(list, "refused", _words)  # noqa: RUF009 - a field
    duplicate_stderr_filters: list[str] = _torchruns(list, "refused", _words)  # noqa: RUF009 - a field
    node_rank: int = _torchruns(0, "rank of this node in a static rendezvous", int)
    master_addr: str = _torchruns("127.0.0.1", "address of node 0 in a static rendezvous")
    master_port: int | None = _torchruns(None, "port of node 0 in a static rendezvous", int)
    local_addr: str | None = _torchruns(None, "address of this node")
    logs_specs: str | None = _torchruns(None, "refused", has_variable=False)
    numa_binding: str | None = _torchruns(
        None, "bind ranks to CPUs near their GPUs, as torch chooses them",
        choices=("node", "socket", "exclusive", "core-complex"), has_variable=False,
    )  # fmt: skip
    signals_to_handle: str = _torchruns("SIGTERM,SIGINT,SIGHUP,SIGQUIT", "signals that end the run")
    shutdown_timeout: int | None = _torchruns(
        None,
        "seconds that a script with no Trainer and no loop has after SIGTERM; --stop-timeout sets this too",
        int,
    )
    standalone: bool = _torchruns(False, "a rendezvous of its own on a free port; the default on one node")
    no_python: bool = _torchruns(False, "refused")
    run_path: bool = _torchruns(False, "refused")
    virtual_local_rank: bool = _torchruns(False, "LOCAL_RANK is 0 and one GPU is visible in every rank")


def option_names(name: str, declared: Declared) -> list[str]:
    """Return how an option is given: its short name, if it has one, and its long one."""
    return [declared.short] * bool(declared.short) + [f"--{name.replace('_', '-')}"]


def declared_options() -> Iterator[tuple[str, Any, Declared]]:
    """Yield name, default and declaration of torchrun's options, as they are declared."""
    for one in fields(TorchrunOptions):
        yield one.name, default_of(one), one.metadata[KEY]


def check_torchruns(options: TorchrunOptions) -> None:
    """Refuse what is not supported.

    Raises:
        UsageError: an option, or a variable `PET_<NAME>`, asks for it.
    """
    for name, reason in REFUSALS.items():
        if getattr(options, name):
            raise UsageError(f"--{name.replace('_', '-')} is not supported: {reason}")


def handler_seconds(options: TorchrunOptions) -> float | None:
    """Return `--shutdown-timeout` in seconds, or that of torch's variable; None for the default.

    Raises:
        UsageError: it is not a number above 0.
    """
    given = options.shutdown_timeout
    text = os.environ.get(SHUTDOWN_VARIABLE) if given is None else str(given)
    if text is not None and not (text.isdecimal() and int(text) > 0):
        raise UsageError(f"--shutdown-timeout {text}: must be a number of seconds above 0")
    return None if text is None else float(text)


def shown_local_ranks(options: TorchrunOptions, ranks: int, show_ranks: str | None) -> frozenset[int] | None:
    """Return the local ranks that torchrun would show on the console; None if no option asks for it.

    Args:
        ranks: number of ranks per node.
        show_ranks: value of `--show-ranks`.

    Raises:
        UsageError: a value is wrong, asks to hide one of the two streams, or contradicts `--show-ranks`.
    """
    from torch.distributed.elastic.multiprocessing import Std, to_map

    defaults = {"local_ranks_filter": "", "redirects": "0", "tee": "0"}
    given = [name for name, default in defaults.items() if getattr(options, name) != default]
    if not given:
        return None
    flag = f"--{given[0].replace('_', '-')}"
    if show_ranks is not None:
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


def numa_cpus(options: TorchrunOptions, ranks: int) -> tuple[tuple[int, ...], ...]:
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
