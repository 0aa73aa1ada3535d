"""What is printed when a run starts: its directory, the address of its metrics, and who else can reach either.

Called by `supervise.py` before the ranks start. Starts the metrics server, because the address that it prints is the
server's.
"""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

from grpo_run.cli.launch_options.parse import LaunchCommand
from grpo_run.runtime.files import short_path
from grpo_run.runtime.record.run_directory import RunDirectory
from grpo_run.runtime.supervision.supervisor import Supervisor

if TYPE_CHECKING:
    from grpo_run.dashboards.metrics.address import Listener
    from grpo_run.dashboards.metrics.server import MetricsServer
    from grpo_run.dashboards.terminal.terminal import Terminal


def announce(
    launch: LaunchCommand,
    directory: RunDirectory,
    supervisor: Supervisor,
    terminal: Terminal,
    listener: Listener | None,
) -> MetricsServer | None:
    """Start the metrics server if it has a socket, and print where the run and its metrics are."""
    place = f"run {launch.config.run_id} in {short_path(directory.path)}"
    mode = stat.S_IMODE(directory.path.stat().st_mode)
    server = None
    if listener is None:
        terminal.notify(place)
    else:
        from grpo_run.dashboards.metrics.server import start

        server = start(supervisor.status, listener)
        host, port = server.address
        terminal.notify(f"{place}, metrics on http://{host}:{port}/metrics")
        if server.open_to_network:
            terminal.notify("warning: the metrics can be read from the network, without authentication")
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        terminal.notify(
            f"warning: other users can write to {short_path(directory.path)} (mode {mode:04o}), so they can replace"
            " the files of the run; use a directory of mode 0700"
        )
    return server
