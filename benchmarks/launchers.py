"""The launchers that are compared, how each is started on the same script, and how a run is ended.

Called by the recovery and overhead benchmarks. Each launcher runs as its users would run it: its defaults,
one poll interval for all, restarts enough for the kills to come. NVIDIA's package goes into an environment of its
own, which reads torch and the rest from the project's, because it brings a `pynvml` that must not replace ours.
Does not measure.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import psutil
from machine import REPOSITORY

OURS = "grpo-run"
TORCHRUN = "torchrun"
FT_LAUNCHER = "ft_launcher"
TORCHRUN_AS_SHIPPED = "torchrun-as-shipped"
NAMES = (OURS, TORCHRUN, FT_LAUNCHER, TORCHRUN_AS_SHIPPED)

SCRIPT = Path(__file__).parent / "scripts" / "grpo.py"
BIN = Path(sys.executable).parent
RANKS = 2
POLL_SECONDS = 0.1
"""torchrun's and ft_launcher's default `--monitor-interval`, said aloud so that it is the same for all."""

PEER_PACKAGES = ("nvidia-resiliency-ext==0.4.1", "defusedxml==0.7.1", "pynvml==13.0.1")
"""NVIDIA's launcher and those of its dependencies that the project does not have."""
PEER_ENVIRONMENT = REPOSITORY / "build" / "peers"
INSTALL_SECONDS = 600.0

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
}
LAUNCHERS_OWN = ("GRPO_RUN_", "PET_", "TORCHELASTIC_")


class LauncherError(Exception):
    """A launcher could not be installed, or a run did not do what the benchmark needs; one line and the output."""


def install_peer(environment: Path = PEER_ENVIRONMENT) -> Path:
    """Make the environment that holds NVIDIA's launcher, once; returns its `bin`.

    Raises:
        LauncherError: the package cannot be had here (no network, or no build for this Python).
    """
    stamp = environment / ".installed"
    wanted = " ".join((*PEER_PACKAGES, sysconfig.get_path("purelib"))) + "\n"
    if stamp.is_file() and stamp.read_text() == wanted:
        return environment / "bin"
    python = environment / "bin" / "python"
    try:
        _install(sys.executable, "-m", "venv", "--clear", str(environment))
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        paths = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
        # behind the environment's own packages on the path, so torch is shared and pynvml is not
        pth = environment / "lib" / version / "site-packages" / "project.pth"
        pth.write_text("\n".join(paths) + "\n")
        # --no-deps: what is missing is named above; a resolver would take torch apart
        _install(
            str(python), "-m", "pip", "install", "--quiet", "--ignore-installed", "--no-deps", *PEER_PACKAGES
        )
    except subprocess.CalledProcessError as error:
        raise LauncherError(
            f"{PEER_PACKAGES[0]} cannot be installed into {environment}; leave {FT_LAUNCHER} out with"
            f" --launchers:\n{error.stderr[-2000:]}"
        ) from error
    stamp.write_text(wanted)
    return environment / "bin"


def _install(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_SECONDS)


def command(name: str, folder: Path, arguments: Sequence[str], *, restarts: int) -> list[str]:
    """The command line that starts `scripts/grpo.py` on two ranks.

    Args:
        name: of `NAMES`.
        folder: of this run; ours keeps its run directory there.
        arguments: of the script. The peers get `--resume` too: grpo-run resumes an unmodified script by itself.
        restarts: how many failures the launcher must be ready to survive.
    """
    common = ["--nproc-per-node", str(RANKS), "--monitor-interval", str(POLL_SECONDS)]
    script = [str(SCRIPT), *arguments]
    if name == OURS:
        return [str(BIN / "grpo-run"), "launch", *common, "--run-dir", str(folder / "run"), *script]
    common += ["--standalone", "--max-restarts", str(restarts)]
    if name in (TORCHRUN, TORCHRUN_AS_SHIPPED):
        return [str(BIN / "torchrun"), *common, *script, "--resume"]
    if name == FT_LAUNCHER:
        # no heartbeat timeouts: a killed process is seen by its exit; no network cards to watch on a CPU machine
        own = ["--ignore-missing-fault-tol-cfg", "--ft-enable-nic-monitor", "false"]
        return [str(install_peer() / "ft_launcher"), *common, *own, *script, "--resume"]
    raise ValueError(f"unknown launcher {name!r}")


def environment(name: str) -> dict[str, str]:
    """The environment to start a launcher in: this one, quiet, without another launcher's variables."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHERS_OWN)}
    variables.update(QUIET)
    if name == TORCHRUN:
        # torch 2.13 keeps the last attempt's Gloo addresses in the rendezvous' store, and restarts fail on them
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return variables


class Training:
    """One run under one launcher; use it in `contextlib.closing`, so that nothing of it is left whatever happens.

    Args:
        name: of `NAMES`.
        folder: made here; holds output, checkpoints and step logs.
        arguments: of the script, beside the paths.
        restarts: see `command`.
    """

    def __init__(self, name: str, folder: Path, arguments: Sequence[str], *, restarts: int = 0) -> None:
        folder.mkdir(parents=True)
        self.name = name
        self.output_dir = folder / "out"
        self.step_log = folder / "steps"
        self._output = folder / "output.txt"
        paths = ["--output-dir", str(self.output_dir), "--step-log", str(self.step_log), "--cpu"]
        words = command(name, folder, [*paths, *arguments], restarts=restarts)
        with open(self._output, "wb") as output:
            self._process = psutil.Popen(
                words, cwd=folder, env=environment(name),
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self._seen: set[psutil.Process] = set()

    def ended(self) -> int | None:
        """The launcher's exit code, None while it runs."""
        code: int | None = self._process.poll()
        return code

    def wait(self, timeout_seconds: float) -> int | None:
        """The launcher's exit code, or None when the time is over."""
        try:
            return int(self._process.wait(timeout_seconds))
        except psutil.TimeoutExpired:
            return None

    def processes(self) -> set[int]:
        """The process ids below the launcher, now."""
        try:
            children = self._process.children(recursive=True)
        except psutil.NoSuchProcess:
            return set()
        self._seen.update(children)
        return {child.pid for child in children}

    def close(self, timeout_seconds: float = 10.0) -> None:
        """End the launcher and every process ever seen below it."""
        self.processes()
        if self._process.is_running():
            self._process.terminate()
            self.wait(timeout_seconds)
        # psutil compares start times, so a number that another process has since got is left alone
        left = [process for process in (self._process, *self._seen) if process.is_running()]
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=timeout_seconds)

    def tail(self, characters: int = 3000) -> str:
        """The end of what the run printed."""
        return self._output.read_text(errors="replace")[-characters:]
