"""The process of a rollout server that a run starts: its command, port, devices, log and end.

The command is the user's, as for `env`: words, with assignments of variables before them. What it does not
say is added: host and port, vLLM's development routes, through which TRL sends weights, and the GPUs that the
ranks leave. Used by `supervisor.py`; `rank.py` asks for a free port. Asks the server nothing (`_watch.py`).
"""

from __future__ import annotations

import re
import shlex
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_run.runtime.errors import ConfigError
from grpo_run.watchdog.evidence.incident_files import read_end
from grpo_run.watchdog.gpu_driver import GpuDriverError, gpu_driver

HOST = "127.0.0.1"
"""A server of this run only: its development routes change weights, and are for nobody else."""
ALL_HOSTS = ("", "0.0.0.0", "::", "localhost")
"""Values of `--host` with which a server is reached at `HOST`, too."""
DEFAULTS = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
"""What TRL needs of vLLM: routes that take weights, and adapters while it runs."""
DEVICES = "CUDA_VISIBLE_DEVICES"
MOST_PORT = 65535
LISTENS_SECONDS = 1.0
"""The kernel accepts a connection to this machine at once."""
TAIL_BYTES = 16 * 1024
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Colours, which vLLM gives the names of its processes, and other control characters."""
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class ServerCommand:
    """What is started.

    Attributes:
        words: of the command, with host and port.
        environment: what differs from that of the run.
        port: where it listens.
        host: where it is reached from this machine, as in an address.
    """

    words: tuple[str, ...]
    environment: Mapping[str, str]
    port: int
    host: str = HOST

    @property
    def base_url(self) -> str:
        """Where it answers."""
        return f"http://{self.host}:{self.port}"


def command_of(
    text: str, environment: Mapping[str, str], *, ranks: int, gpus: Sequence[str]
) -> ServerCommand:
    """Return what a user's command starts.

    Args:
        text: of the command.
        environment: of the run.
        ranks: on this node; each uses one GPU.
        gpus: that the run sees, as `CUDA_VISIBLE_DEVICES` names them.

    Raises:
        ConfigError: it names no program, or its port is no number.
    """
    words = shlex.split(text)
    own: dict[str, str] = {}
    while words and (match := _ASSIGNMENT.fullmatch(words[0])):
        own[match[1]] = match[2]
        del words[0]
    if not words:
        raise ConfigError(f"--rollout-server {text!r} names no program")
    if shutil.which(words[0], path=own.get("PATH", environment.get("PATH"))) is None:
        raise ConfigError(f"--rollout-server: {words[0]} is not a program that can be found on PATH")
    given = {**environment, **own}
    added = {name: value for name, value in DEFAULTS.items() if name not in given}
    if DEVICES not in own and gpus:
        if not (left := gpus[ranks:]):
            raise ConfigError(
                f"--rollout-server: the ranks use all {len(gpus)} GPUs of this node; leave some with"
                f" --nproc-per-node, or say which it uses: '{DEVICES}=0 {text}'"
            )
        added[DEVICES] = ",".join(left)
    port = _value_of(words, "--port")
    if port is None:
        port = str(free_port())
        words += ["--port", port]
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) <= MOST_PORT:
        raise ConfigError(f"--rollout-server: --port {port} is no number from 1 to {MOST_PORT}")
    host = _value_of(words, "--host")
    if host is None:
        words += ["--host", HOST]
    reached = HOST if host in (None, *ALL_HOSTS) else host
    if listens(reached, int(port)):  # it would be taken for this run's, and be sent weights
        raise ConfigError(f"--rollout-server: at --port {port} another program listens already")
    return ServerCommand(
        words=tuple(words),
        environment={**added, **own},
        port=int(port),
        host=f"[{reached}]" if ":" in reached else reached,
    )


def _value_of(words: Sequence[str], option: str) -> str | None:
    """Return the value of an option among words; None if it is not given."""
    found = None  # the last one counts
    for word, following in zip(words, (*words[1:], None), strict=True):
        if word.startswith(f"{option}="):
            found = word.partition("=")[2]
        elif word == option and following is not None:
            found = following
    return found


def free_port() -> int:
    """Return a port at which nothing listens at present."""
    with socket.socket() as opened:
        opened.bind((HOST, 0))
        return int(opened.getsockname()[1])


def listens(host: str, port: int) -> bool:
    """Whether a program accepts connections at an address of this machine."""
    try:
        socket.create_connection((host, port), LISTENS_SECONDS).close()
    except OSError:
        return False
    return True


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """Return the GPUs that a process with this environment sees, as `CUDA_VISIBLE_DEVICES` names them; empty
    without any.
    """
    if (given := environment.get(DEVICES)) is not None:
        return [one.strip() for one in given.split(",") if one.strip()]
    try:
        with gpu_driver() as nvml:
            return [str(number) for number in range(nvml.nvmlDeviceGetCount())]
    except GpuDriverError:
        return []


def last_lines(log: Path, count: int) -> list[str]:
    """Return the last lines of a log that are not empty, without what a terminal would obey."""
    try:
        text = read_end(log, TAIL_BYTES).decode(errors="replace")
    except OSError:
        return []
    lines = (_CONTROL.sub("", line).strip() for line in re.split(r"[\r\n]+", text))
    return [line for line in lines if line][-count:]
