"""Which processes belong to a run: the token that they inherit, their cgroup, and the process that adopts orphans.

Called by `supervise.py` before anything else is started, so that whatever the run starts is marked. Terminates
nothing.
"""

from __future__ import annotations

import atexit
import os
import secrets
from dataclasses import dataclass

from grpo_run.runtime.host_memory.own_cgroup import OwnCgroup
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.processes import forkserver
from grpo_run.runtime.processes.adoption import adopt_orphans, own_children
from grpo_run.watchdog.run_processes.ownership import TOKEN_VARIABLE, RunProcesses

PRELOAD = ("grpo_run.trainers.preload",)


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnProcesses:
    """What tells the processes of one run from others."""

    token: str
    """In the environment of everything that the run starts."""
    marks: dict[str, str]
    """Environment variables of a rank that carry the token."""
    owned: RunProcesses
    cgroup: OwnCgroup
    """Of the forkserver and the ranks, if one may be made here."""


def own_processes(config: RunConfig) -> OwnProcesses:
    """Mark what this process starts as the run's, and start the forkserver if ranks are forked from one."""
    token = secrets.token_hex(16)
    # setproctitle would overwrite the environment that /proc shows, and the token with it
    marks = {TOKEN_VARIABLE: token, "SPT_NOENV": "1"}
    owned = RunProcesses(
        os.getpid(),
        os.getsid(0),
        tokens=(token,),
        started_by_supervisor=own_children,
        adopts_only_ours=adopt_orphans(),
    )
    cgroup = OwnCgroup.make()
    atexit.register(cgroup.remove)  # whichever way this process ends
    if config.preload:
        cgroup.enter(forkserver.start_server(PRELOAD, marks))
    return OwnProcesses(token=token, marks=marks, owned=owned, cgroup=cgroup)
