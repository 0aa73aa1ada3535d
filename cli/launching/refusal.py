"""What a host whose command is refused tells the other hosts, which would wait without knowing why.

Called by `cli/launch.py` after a mistake in the options, the files or the settings, before this host has met
the others. They name it and why, and wait on, as the user may correct it, or go on without it. Where none can
be told, as on the host of the endpoint itself, the user learns that the others wait. Changes no exit code.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Sequence
from itertools import takewhile

from grpo_run.cli.command_parser import CommandParser
from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.launching.torchrun import TorchrunOptions
from grpo_run.runtime.processes.signs_of_life import LOOK_SECONDS, Answer, probe

TELL_SECONDS = 15.0
"""For hosts that are started at the same time: the one of the endpoint has to import torch first."""
OPTIONS = ("nnodes", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "local_addr")


def tell_others(arguments: Sequence[str], error: UsageError) -> None:
    """Let the other hosts know why this one does not come, or add to the error that they wait.

    Args:
        arguments: of the command, of which nothing is known but that something is wrong.
        error: what is.
    """
    parser, why = CommandParser(add_help=False, allow_abbrev=False), str(error).rstrip(".")
    for name in OPTIONS:
        default = os.environ.get(f"PET_{name.upper()}", getattr(TorchrunOptions, name))
        parser.add_argument(f"--{name.replace('_', '-')}", f"--{name}", default=default)
    with contextlib.suppress(ValueError):  # the mistake is in one of them
        # the words of the script may look like options
        words = [
            *takewhile(lambda word: word not in ("-m", "--module", "--") and word[-3:] != ".py", arguments)
        ]
        nodes, kind, endpoint, run_id, address = vars(parser.parse_known_args(words)[0]).values()
        if int(nodes.rpartition(":")[2]) > 1 and not _told(kind, endpoint, run_id, address, why):
            error.args = (f"{why}. The other hosts wait for this one: start it again, or stop them.",)


def _told(kind: str, endpoint: str, run_id: str, address: str | None, why: str) -> bool:
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

    from grpo_run.runtime.upstream import rendezvous_names as names

    parameters = RendezvousParameters(kind, endpoint, run_id, 1, 1)
    told, place, deadline = False, names.endpoint(parameters), time.monotonic() + TELL_SECONDS
    if kind != "c10d" or names.serves(parameters):
        return False
    print(f"grpo-run: {why}; telling the other hosts at {endpoint}", file=sys.stderr)
    while not told and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        with contextlib.suppress(RendezvousConnectionError, RuntimeError):  # its host has just gone
            if probe(*place) is Answer.accepted:
                told = names.refuse(
                    names.connect(place, run_id), address or socket.getfqdn(), f"was refused: {why}"
                )
    return told
