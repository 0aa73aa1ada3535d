"""The launchers to compare: how each starts the same script, and how a run is terminated.

Called by the benchmarks that compare. Each launcher runs with its defaults, and enough restarts for
the scheduled kills. NVIDIA's package is installed into a separate environment, which shares torch and other
packages with the project's, because it installs a `pynvml` that must not replace the project's. Does not
measure.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import psutil

from parts.machine import REPOSITORY

OURS = "grpo-run"
TORCHRUN = "torchrun"
FT_LAUNCHER = "ft_launcher"
TORCHRUN_AS_SHIPPED = "torchrun-as-shipped"
ACCELERATE = "accelerate"
TORCHFT = "torchft"
NAMES = (OURS, TORCHRUN, ACCELERATE, FT_LAUNCHER, TORCHRUN_AS_SHIPPED)
"""Those that start a script as it is. torchft needs one that is written for it."""

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "grpo.py"
TORCHFT_SCRIPT = SCRIPT.with_name("torchft_loop.py")
BIN = Path(sys.executable).parent
RANKS = 2
POLL_SECONDS = 0.1
"""The default `--monitor-interval` of torchrun and ft_launcher, passed to them explicitly."""

PEER_PACKAGES = (
    "nvidia-resiliency-ext==0.4.1", "defusedxml==0.7.1", "pynvml==13.0.1",
    "torchft==0.2.0", "opentelemetry-sdk==1.39.1", "opentelemetry-api==1.39.1",
    "opentelemetry-semantic-conventions==0.60b1", "opentelemetry-proto==1.39.1",
    "opentelemetry-exporter-otlp-proto-http==1.39.1", "opentelemetry-exporter-otlp-proto-common==1.39.1",
    "googleapis-common-protos==1.72.0", "protobuf==6.33.2", "importlib-metadata==8.7.0", "zipp==3.23.0",
)  # fmt: skip
"""NVIDIA's launcher, torchft, and their dependencies that the project does not install."""
PEER_ENVIRONMENT = REPOSITORY / "build" / "peers"
INSTALL_SECONDS = 600.0

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
}
LAUNCHER_PREFIXES = ("GRPO_RUN_", "PET_", "TORCHELASTIC_")


class LauncherError(Exception):
    """A launcher could not be installed, or a run failed. The message has one line and the run's output."""


def install_peer(environment: Path = PEER_ENVIRONMENT) -> Path:
    """Create the environment of NVIDIA's launcher if it does not exist; return its `bin` folder.

    Raises:
        LauncherError: the package cannot be installed (no network, or no build for this Python version).
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
        # A .pth entry comes after the environment's own packages, so torch is shared and pynvml is not.
        pth = environment / "lib" / version / "site-packages" / "project.pth"
        pth.write_text("\n".join(paths) + "\n")
        # --no-deps, because the resolver would replace torch; the missing dependencies are in PEER_PACKAGES.
        _install(
            str(python), "-m", "pip", "install", "--quiet", "--ignore-installed", "--no-deps", *PEER_PACKAGES
        )
    except subprocess.CalledProcessError as error:
        raise LauncherError(
            f"cannot install {PEER_PACKAGES[0]} into {environment}; exclude {FT_LAUNCHER} with"
            f" --launchers:\n{error.stderr[-2000:]}"
        ) from error
    stamp.write_text(wanted)
    return environment / "bin"


def _install(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_SECONDS)


def command(
    name: str, folder: Path, arguments: Sequence[str], *, restarts: int, ranks: int = RANKS
) -> list[str]:
    """Return the command that starts `scripts/grpo.py`.

    Args:
        name: one of `NAMES`, or torchft.
        folder: folder of this run; holds the run directory of grpo-run.
        arguments: arguments of the script. The peers also get `--resume`; grpo-run resumes without it.
        restarts: number of failures the launcher must recover from.
    """
    common = ["--nproc-per-node", str(ranks)]
    script = [str(SCRIPT), *arguments]
    if name == OURS:
        return [str(BIN / "grpo-run"), "launch", *common, "--run-dir", str(folder / "run"), *script]
    common += ["--monitor-interval", str(POLL_SECONDS), "--standalone", "--max-restarts", str(restarts)]
    if name in (TORCHRUN, TORCHRUN_AS_SHIPPED):
        return [str(BIN / "torchrun"), *common, *script, "--resume"]
    if name == ACCELERATE:  # which hands these options on to torchrun
        own = ["--multi_gpu", "--num_processes", str(ranks), "--num_machines", "1", "--mixed_precision", "no",
               "--dynamo_backend", "no", "--main_process_port", "0", "--max_restarts", str(restarts),
               "--monitor_interval", str(POLL_SECONDS)]  # fmt: skip
        return [str(BIN / "accelerate"), "launch", *own, *script, "--resume"]
    if name == TORCHFT:
        return [str(install_peer() / "python"), str(TORCHFT_SCRIPT), *arguments, "--restarts", str(restarts)]
    if name == FT_LAUNCHER:
        # Heartbeat timeouts are not needed, because a killed process is detected by its exit. The NIC monitor
        # does not apply to a machine without GPUs.
        own = ["--ignore-missing-fault-tol-cfg", "--ft-enable-nic-monitor", "false"]
        return [str(install_peer() / "ft_launcher"), *common, *own, *script, "--resume"]
    raise ValueError(f"unknown launcher {name!r}")


def environment(name: str) -> dict[str, str]:
    """Return the environment for a launcher: the current one without variables of other launchers."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHER_PREFIXES)}
    variables.update(QUIET)
    if name in (TORCHRUN, ACCELERATE):
        # Torch 2.13 keeps the Gloo addresses of the previous attempt in the rendezvous store; restarts then
        # fail.
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return variables


class Training:
    """One run under one launcher. Use it in `contextlib.closing`, so that all its processes are terminated.

    Args:
        name: one of `NAMES`.
        folder: folder to create for output, checkpoints and step logs.
        arguments: arguments of the script, except the paths.
        restarts: number of failures the launcher must recover from.
    """

    def __init__(
        self, name: str, folder: Path, arguments: Sequence[str], *, restarts: int = 0, ranks: int = RANKS
    ) -> None:
        folder.mkdir(parents=True)
        self.name = name
        self.output_dir = folder / "out"
        self.step_log = folder / "steps"
        self._output = folder / "output.txt"
        paths = ["--output-dir", str(self.output_dir), "--step-log", str(self.step_log), "--cpu"]
        words = command(name, folder, [*paths, *arguments], restarts=restarts, ranks=ranks)
        with open(self._output, "wb") as output:
            self._process = psutil.Popen(
                words, cwd=folder, env=environment(name),
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self._seen: set[psutil.Process] = set()

    @property
    def pid(self) -> int:
        """Process ID of the launcher."""
        pid: int = self._process.pid
        return pid

    def ended(self) -> int | None:
        """Return the launcher's exit code, or None while it runs."""
        code: int | None = self._process.poll()
        return code

    def wait(self, timeout_seconds: float) -> int | None:
        """Wait for the launcher; return its exit code, or None after the timeout."""
        try:
            return int(self._process.wait(timeout_seconds))
        except psutil.TimeoutExpired:
            return None

    def processes(self) -> set[int]:
        """Return the IDs of the launcher's current descendants."""
        try:
            children = self._process.children(recursive=True)
        except psutil.NoSuchProcess:
            return set()
        self._seen.update(children)
        return {child.pid for child in children}

    def close(self, timeout_seconds: float = 10.0) -> None:
        """Terminate the launcher and all descendants ever seen."""
        self.processes()
        if self._process.is_running():
            self._process.terminate()
            self.wait(timeout_seconds)
        # psutil compares start times, so a process that reuses an ID is not killed.
        remaining = [process for process in (self._process, *self._seen) if process.is_running()]
        for process in remaining:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(remaining, timeout=timeout_seconds)

    def tail(self, characters: int = 3000) -> str:
        """Return the end of the run's output."""
        return self._output.read_text(errors="replace")[-characters:]
