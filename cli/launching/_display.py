"""What `grpo-run launch` shows of a run: the terminal, and the server of its metrics and its page.

Implements the `Display` of `runtime/launching/`. Nothing that is printed while a run lasts waits for its
reader. `announce` prints the run directory, the address of the metrics, and who else can reach either; it
starts the metrics server, because the address is the server's. The exporter runs until a regular scraper has
read how the run ended; how long is decided in `dashboards/metrics/_collector.py`. Made by `command.py`.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from grpo_run.dashboards.metrics.address import DEFAULT_ADDRESS, Listener, open_listener, parse_address
from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.files import short_path
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.config import Output, RunConfig
from grpo_run.runtime.launch.option import OptionGroup, option
from grpo_run.runtime.registry import announce_target, targets_folder, token_file
from grpo_run.watchdog.text import duration_text

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.routing import Route

    from grpo_run.dashboards.metrics.server import MetricsServer
    from grpo_run.dashboards.terminal.background_output import BackgroundOutput, BackgroundStream
    from grpo_run.dashboards.terminal.terminal import Terminal
    from grpo_run.runtime.history.status import RunStatus

SERVER_STOP_SECONDS = 2.0
UNNOTICED_SECONDS = 2.0
"""A longer wait is announced."""


@dataclass(frozen=True, kw_only=True)
class DisplayOptions:
    """What the command shows, and where."""

    metrics_addr: str = option(
        DEFAULT_ADDRESS, "--metrics-addr", group=OptionGroup.display, metavar="HOST:PORT|off",
        most_used=True,
        help="address of the Prometheus metrics, which must be free; the default moves to the next free port",
    )  # fmt: skip
    label_ranks: bool = option(
        False, "--label-ranks", group=OptionGroup.display,
        help="put the rank before each line of the ranks' output in a pipe or a file, as on a terminal",
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.metrics_addr != "off":
            parse_address(self.metrics_addr)


def output_form() -> Output:
    """Return how the output of ranks is shown, from what standard output and standard error lead to."""
    if sys.stdout is None or os.isatty(1):
        return Output.lines
    return Output.merged if sys.stderr is None or os.path.sameopenfile(1, 2) else Output.apart


class CommandDisplay:
    """The display of one run. See `Display` for the methods and their order.

    Args:
        options: of the command.
        brief: nobody has said which ranks are shown: on a terminal, lines that repeat the progress line are
            left out.
    """

    def __init__(self, options: DisplayOptions, *, brief: bool = False) -> None:
        self._labels = options.label_ranks
        self._brief = brief
        self._asked_address = options.metrics_addr
        self._listener: Listener | None = None
        self._server: MetricsServer | None = None
        self._background: tuple[BackgroundOutput, ...] = ()
        self._streams: tuple[TextIO, TextIO] | None = None

    def reserve(self) -> None:
        """Open the port of the metrics server."""
        if self._asked_address != "off":
            self._listener = open_listener(
                self._asked_address, exactly=self._asked_address != DEFAULT_ADDRESS
            )

    def release(self) -> None:
        """Close the port, unless the server has it."""
        if self._listener is not None:
            self._listener.socket.close()

    def begin(self, config: RunConfig, tell: Callable[[str], None]) -> Terminal:
        """Print in the background from now on."""
        from grpo_run.dashboards.terminal.background_output import BackgroundOutput
        from grpo_run.dashboards.terminal.terminal import Terminal

        self._config = config
        printed = BackgroundOutput()
        # a reader of one stream does not wait for that of the other, unless both are one, which keeps the
        # order
        errors = BackgroundOutput() if config.output is Output.apart else printed
        self._background = (errors, printed)
        self._streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = printed.stream(sys.stdout), errors.stream(sys.stderr)
        self._brief = self._brief and config.output is Output.lines and config.shown_ranks == {0}
        terminal = Terminal(
            shown_ranks=config.shown_ranks,
            passed_on={} if self._labels else _passed_on(config.output),
            brief=self._brief,
            tell=tell,
        )
        self._notify = terminal.notify
        return terminal

    def finish(self, interrupted: Callable[[], bool]) -> None:
        """Print what waits."""
        if self._streams is not None:
            sys.stdout, sys.stderr = self._streams
        for output in self._background:
            output.finish(interrupted)

    def announce(self, directory: RunDirectory, status: Callable[[], RunStatus]) -> None:
        """Start the metrics server, and tell the user and Prometheus where it is."""
        place = f"run {self._config.run_id} in {short_path(directory.path)}"
        if self._listener is None:
            self._notify(place)
        else:
            self._serve(self._listener, directory, status, place)
        if self._config.output is Output.lines:
            shown = "rank 0 is shown, without bars and metrics; all" if self._brief else "all output"
            run = short_path(directory.path)
            self._notify(f"{shown}: `grpo-run logs -f {run}`, state: `grpo-run status {run}`, stop: Ctrl-C")
        mode = stat.S_IMODE(directory.path.stat().st_mode)
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            self._notify(
                f"warning: other users can write to {short_path(directory.path)} (mode {mode:04o}), so they"
                " can replace the files of the run; use a directory of mode 0700"
            )

    def _serve(
        self, listener: Listener, directory: RunDirectory, status: Callable[[], RunStatus], place: str
    ) -> None:
        from grpo_run.dashboards.live.token import read_token
        from grpo_run.dashboards.metrics.server import start

        token = None
        with contextlib.suppress(UsageError):  # `grpo-run serve` says why there is no page
            token = read_token(token_file())

        def page(also: Sequence[Route]) -> Starlette:
            from grpo_run.dashboards.live.server import application_of

            return application_of(directory, token or "", listener.accepts_host, also)

        server = self._server = start(status, listener, page=page if token else None)
        host, port = server.address
        self._notify(f"{place}, metrics on http://{host}:{port}/metrics")
        if token and self._config.output is Output.lines:  # elsewhere others may read it
            self._notify(f"live page on http://{server.target}/{token}/")
        if server.open_to_network:
            self._notify("warning: the metrics can be read from the network, without authentication")
        targets = targets_folder()
        if not announce_target(directory.path, targets, target=server.target, run_id=self._config.run_id):
            self._notify(f"Prometheus has to be told the address: {targets} cannot be written")

    def linger(self, *, ended_at: float, until: float, interrupted: Callable[[], bool]) -> None:
        """Wait until a regular scraper has read the last state twice, or will not come; end the server."""
        if self._server is None:
            return
        seconds = min(self._server.seconds_to_stay(ended_at), until - time.monotonic())
        if seconds > UNNOTICED_SECONDS:
            self._notify(
                f"waiting up to {duration_text(seconds)} until the last state has been scraped (Ctrl-C to"
                " exit now)"
            )
        if seconds > 0:
            self._server.await_last_scrapes(ended_at, lambda: interrupted() or time.monotonic() >= until)
        self._server.stop(SERVER_STOP_SECONDS)


def _passed_on(output: Output) -> dict[int, BackgroundStream]:
    """Return the streams that get the ranks' output byte for byte, by descriptor."""
    from grpo_run.dashboards.terminal.background_output import BackgroundStream

    taken = {Output.lines: {}, Output.merged: {1: sys.stdout}, Output.apart: {1: sys.stdout, 2: sys.stderr}}
    return {
        descriptor: stream
        for descriptor, stream in taken[output].items()
        if isinstance(stream, BackgroundStream) and not stream.isatty()
    }
