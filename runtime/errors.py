"""Every error that grpo-run raises on purpose.

    GrpoRunError
    ├── UsageError(ValueError)        the user can correct it; exit code 2, one line, nothing is lost
    │   ├── ConfigError               a setting, a recipe or a configuration file is wrong
    │   │   └── MissingPackageError   a package that a command needs is not installed (names what to install)
    │   ├── HostsMissingError         the script's batch cannot be kept with fewer hosts
    │   └── RunDirectoryError         the run directory cannot be used, or is in use
    ├── ConsensusError                ranks disagree where they must agree (names the ranks and the values)
    ├── CheckpointError               a checkpoint is incomplete or damaged (names the file and the reason)
    ├── SupersededError               a newer attempt of the run has begun on other hosts
    ├── RewardError                   no reward of many rollouts in a row was valid
    ├── ResumeMismatchError           a restarted script does not continue its train() calls
    ├── NoHeadroomError               not enough memory for a snapshot (names the limit); goes to disk
    ├── IllegalTransition             a lifecycle event is illegal in the present state; a bug in grpo-run
    ├── HostsLostError                the hosts of a run cannot meet, or one has ended it for all
    └── ProcessError                  a process could not be started, or survived SIGKILL

    Stopped(SystemExit)               exits the user's script after an agreed stop; not an error
    AlarmRaised(SystemExit)           exits it because the ranks ended the attempt on purpose
    Superseded(SystemExit)            exits it because a newer attempt of the run has begun on other hosts

Errors of torch and of the user's script are not wrapped.
"""

from __future__ import annotations

from grpo_run.watchdog.observation import Alarm

EXIT_FINISHED = 0
EXIT_USAGE = 2
EXIT_STOPPED = 75
"""`EX_TEMPFAIL` of sysexits.h: run the same command again to resume."""
EXIT_GAVE_UP = 93
"""Do not requeue: an incident report is written, or the run was stopped and nothing of it is saved. NVIDIA's
resiliency extension uses the same code."""


class GrpoRunError(Exception):
    """Base class of all errors; raise a subclass."""

    def __init__(self, *args: object) -> None:
        assert type(self) is not GrpoRunError, "raise a subclass"
        super().__init__(*args)


class UsageError(GrpoRunError, ValueError):
    """The command, a file or a setting is wrong. The message says what, where, and how to correct it."""


class ConfigError(UsageError):
    """A setting, a recipe or a configuration file is wrong."""


class RunDirectoryError(UsageError):
    """The run directory cannot be read or written, or a live supervisor owns it."""


class MissingPackageError(ConfigError):
    """A package that a command needs is not installed."""


class HostsMissingError(UsageError):
    """The script's batch cannot be kept with fewer hosts; the run waits for all of them."""


class ConsensusError(GrpoRunError):
    """Ranks disagree at a point where they must agree."""


class CheckpointError(GrpoRunError):
    """A checkpoint is incomplete or does not match its manifest."""


class SupersededError(GrpoRunError):
    """A newer attempt of this run has begun on other hosts, so this one changes no checkpoint any more."""


class RewardError(GrpoRunError):
    """No reward of many rollouts in a row was valid. A restart would not help, so the run ends."""


class ResumeMismatchError(GrpoRunError):
    """A restarted script repeats or leaves out work of the run, and the user requires that it does not."""


class NoHeadroomError(GrpoRunError):
    """There is not enough memory for a snapshot.

    No memory was taken; the checkpoint can be written to disk.
    """


class IllegalTransition(GrpoRunError):
    """A lifecycle event is illegal in the present state; the state is unchanged."""


class ProcessError(GrpoRunError):
    """A rank's process could not be started, or did not exit after SIGKILL."""


class HostsLostError(GrpoRunError):
    """The hosts of a run cannot meet, or have lost the one where they meet. The run ends with 75: the same
    commands continue it, on these hosts or on others.

    Args:
        exit_code: another one if a host has ended the run of all with it.
    """

    def __init__(self, sentence: str, *, exit_code: int = EXIT_STOPPED) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


class Stopped(SystemExit):
    """Exits the user's script with code 75, after all ranks agreed to stop and saved.

    Args:
        step: at which they stopped.
    """

    def __init__(self, step: int) -> None:
        super().__init__(EXIT_STOPPED)
        self.step = step


class AlarmRaised(SystemExit):
    """Exits the user's script because all ranks have agreed to end the attempt on purpose.

    No `except Exception` of the script may catch it: it would save or evaluate the weights.

    Args:
        alarm: why; None on a rank that only took part in the vote.
    """

    def __init__(self, alarm: Alarm | None) -> None:
        super().__init__(EXIT_GAVE_UP)
        self.alarm = alarm

    def __str__(self) -> str:
        return "another rank has raised an alarm" if self.alarm is None else self.alarm.sentence


class Superseded(SystemExit):
    """Exits the user's script because a newer attempt of the run has begun on other hosts."""

    def __init__(self) -> None:
        super().__init__(1)

    def __str__(self) -> str:
        return "a newer attempt of this run has begun on other hosts"
