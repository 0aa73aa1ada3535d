"""Every error grpo-run raises on purpose.

    GrpoRunError
    ├── UsageError(ValueError)        the user can mend it; exit code 2, one line, nothing lost
    │   ├── ConfigError               a setting, a recipe or a configuration file
    │   ├── RunDirectoryError         the run directory cannot be used, or is in use
    │   └── UntestedVersionError      a library outside the range this release was tested with
    ├── ConsensusError                ranks disagree where they must agree (names the ranks and the values)
    ├── CheckpointError               a checkpoint that cannot be trusted (names the file and why)
    ├── NoRoomError                   no memory to hold a checkpoint in (names the limit); write it to disk instead
    ├── IllegalTransition             a lifecycle event in a state that does not allow it; our own bug
    └── ProcessError                  a process that could not be started, or would not die

    Stopped(SystemExit)               unwinds the user's script after an agreed stop; not an error

Does not include anything raised by torch or the user's script: those pass through unchanged.
"""

from __future__ import annotations

EXIT_FINISHED = 0
EXIT_USAGE = 2
EXIT_STOPPED = 75
"""`EX_TEMPFAIL` of sysexits.h: run the same command again to go on."""
EXIT_GAVE_UP = 93
"""Do not requeue; the report is written. The code NVIDIA's resiliency extension uses for the same."""


class GrpoRunError(Exception):
    """Base of all; never raised itself."""

    def __init__(self, *args: object) -> None:
        assert type(self) is not GrpoRunError, "raise a subclass"
        super().__init__(*args)


class UsageError(GrpoRunError, ValueError):
    """The command, a file or a setting is wrong: the message says what, where and what to do."""


class ConfigError(UsageError):
    """A setting, a recipe or a configuration file is wrong."""


class RunDirectoryError(UsageError):
    """The run directory cannot be written, or a live supervisor owns it."""


class UntestedVersionError(UsageError):
    """An installed library is outside the range this release was tested with."""


class ConsensusError(GrpoRunError):
    """Ranks disagree at a point where they must agree."""


class CheckpointError(GrpoRunError):
    """A checkpoint is incomplete or does not match its manifest."""


class NoRoomError(GrpoRunError):
    """There is no memory to hold a checkpoint in; nothing was taken, and it can be written directly instead."""


class IllegalTransition(GrpoRunError):
    """A lifecycle event arrived in a state that does not allow it; the state is unchanged."""


class ProcessError(GrpoRunError):
    """A rank's process could not be started or would not die."""


class Stopped(SystemExit):
    """Leaves the user's script after all ranks agreed to stop and saved; exits with code 75."""

    def __init__(self, step: int) -> None:
        super().__init__(EXIT_STOPPED)
        self.step = step
