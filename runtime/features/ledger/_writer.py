"""Writes the ledger of one rank for one call. Used by `rank.py`.

A file that cannot be written ends the ledger, never the training.
"""

from __future__ import annotations

from typing import Any

from grpo_run.runtime.features.ledger._lines import append, ledger_file
from grpo_run.runtime.rank.session import Session


class Writer:
    """Writes the file of one rank for one call.

    Args:
        call: the number of the call in the run.
    """

    def __init__(self, session: Session, call: int, generations: int, micro_steps: int) -> None:
        self._session = session
        self._call = [call, session.settings.attempt]
        self._geometry = [session.world_size, generations, micro_steps]
        self.file = ledger_file(session.config.run_directory, session.rank)
        self._begun = self._failed = False

    def step_begins(self, step: int) -> None:
        """Say where the call begins, before its first step."""
        if self._begun:
            return
        self._begun = True
        try:
            self.file.parent.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            self._end(error)
        self.write("B", *self._call, step - 1, *self._geometry)

    def write(self, *line: Any) -> None:
        """Append a line, unless an earlier one could not be written."""
        if self._failed:
            return
        try:
            append(self.file, *line)
        except OSError as error:
            self._end(error)

    def _end(self, error: OSError) -> None:
        self._failed = True
        self._session.warn_in_journal(f"the ledger of prompts ends here: {error}")
