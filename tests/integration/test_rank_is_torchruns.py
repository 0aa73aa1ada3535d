"""To the user's script, a rank of grpo-run is indistinguishable from a rank of torchrun."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.references import torchrun
from support.runs import Run

OBSERVE = """
import json, multiprocessing, os, signal, sys, threading
import torch, numpy
rank = os.environ["RANK"]
here = {
    "environment": dict(os.environ),
    "argv": sys.argv,
    "path": sys.path,
    "main": {name: repr(sys.modules["__main__"].__dict__.get(name)) for name in ("__name__", "__file__", "__spec__")},
    "main_is_this": sys.modules["__main__"].__dict__.get("rank") == rank,
    "cwd": os.getcwd(),
    "session": os.getsid(0) == os.getpid(),
    "group": os.getpgid(0) == os.getpid(),
    "umask": oct(os.umask(0)),
    "threads": [thread.name for thread in threading.enumerate() if not thread.name.startswith("grpo-run")],
    "main_thread": threading.current_thread() is threading.main_thread(),
    "process_name": multiprocessing.current_process().name,
    "parent_process": repr(multiprocessing.parent_process()),
    "daemon": multiprocessing.current_process().daemon,
    "start_method": multiprocessing.get_start_method(),
    "torch_threads": torch.get_num_threads(),
    "torch_seed": torch.initial_seed(),
    "grad": torch.is_grad_enabled(),
    "signals": {name: str(signal.getsignal(getattr(signal, name))) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGPIPE")},
    "recursion": sys.getrecursionlimit(),
    "executable": sys.executable,
    "hooks": [sys.excepthook.__name__, threading.excepthook.__name__],
    "write_through": sys.stdout.write_through,
    "stdin": [sys.stdin.encoding, sys.stdin.errors, sys.stdin.fileno(), os.readlink("/proc/self/fd/0")],
    "numpy": numpy.random.randint(1 << 30),
    "python_random": __import__("random").random(),
    "initialized": torch.distributed.is_initialized(),
    "parent": os.getppid(),
    "title": open("/proc/self/cmdline").read().replace(chr(0), " ").strip(),
}
def function(): pass
import pickle
here["pickles_main"] = pickle.loads(pickle.dumps(function)) is function
json.dump(here, open(os.path.join(os.environ["OBSERVED"], f"rank{rank}.json"), "w"))
"""  # noqa: E501

LAUNCHERS = ("cold", "warm")
"""`grpo-run launch`, and the same from the warm launcher of these tests."""
FRESH = "fresh"
"""`grpo-run launch --no-preload`, from the warm launcher."""
DRAWN = ("numpy", "python_random", "torch_seed")
"""Values of unseeded generators, which differ in each process."""

DIFFER_BY_NATURE = {
    "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "OBSERVED", "MASTER_ADDR",
    "TORCHELASTIC_MAX_RESTARTS", "_", "PYTEST_CURRENT_TEST", "TORCH_FR_BUFFER_SIZE", "SPT_NOENV",
}  # fmt: skip
"""Ports, ids and paths of one run, the restart budget, the shell's `_`, the size of the Flight Recorder's
buffer, and that titles of processes must not overwrite the environment that /proc shows."""


Observations = dict[str, list[dict[str, Any]]]
"""What the script observed, by launcher and rank."""


def observe(folder: Path, launchers: Sequence[str]) -> Observations:
    """Run the script under torchrun and these launchers."""
    (folder / "scripts").mkdir()
    (folder / "scripts" / "observe.py").write_text(OBSERVE)
    command = ["--nproc-per-node", "2", "scripts/observe.py", "--x", "a b", ""]
    seen: Observations = {}
    for launcher in ("torchrun", *launchers):
        out = folder / launcher
        out.mkdir()
        environment = {"OBSERVED": str(out), "OMP_NUM_THREADS": "1"}
        if launcher == "torchrun":
            torchrun(folder, command, environment=environment)
        else:
            extra = ["--no-preload"] if launcher == FRESH else []
            cold = launcher == "cold"
            run = Run(
                folder, [*extra, *command], name=f"run-{launcher}", environment=environment, cold=cold or None
            )
            try:
                run.start().ended()
            finally:
                run.close()
        seen[launcher] = [json.loads((out / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    return seen


@pytest.fixture(scope="module")
def observations(tmp_path_factory: pytest.TempPathFactory) -> Observations:
    """What the script observed under torchrun and `LAUNCHERS`."""
    return observe(tmp_path_factory.mktemp("observations"), LAUNCHERS)


def check_equal(observations: Observations, launcher: str) -> None:
    """Hold that environment, arguments, module, session, signals and threads are equal to those under
    torchrun.
    """
    for reference, ours in zip(observations["torchrun"], observations[launcher], strict=True):
        for name in set(reference) - {"environment", *DRAWN, "parent", "title"}:
            assert ours[name] == reference[name], (launcher, name)
        theirs, own = (
            {
                name: value
                for name, value in observed["environment"].items()
                if name not in DIFFER_BY_NATURE and not name.startswith("GRPO_RUN_")
            }
            for observed in (reference, ours)
        )
        assert own == theirs, launcher
        assert set(reference["environment"]) - set(ours["environment"]) <= {"_"}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_script_observes_the_same_as_under_torchrun(observations: Observations, launcher: str) -> None:
    """In a rank that was forked."""
    check_equal(observations, launcher)


@pytest.mark.full
def test_script_in_a_fresh_interpreter_observes_the_same_as_under_torchrun(tmp_path: Path) -> None:
    """In a rank that was not."""
    check_equal(observe(tmp_path, [FRESH]), FRESH)


def test_unseeded_generators_differ_between_ranks(observations: Observations) -> None:
    """Forked ranks do not share the state of torch's, numpy's and Python's generators."""
    for name in DRAWN:
        first, second = observations["cold"]
        assert first[name] != second[name], name


def test_title_names_run_rank_and_script(observations: Observations) -> None:
    """The process title names rank and script."""
    for rank, ours in enumerate(observations["cold"]):
        assert ours["title"].startswith(f"grpo-run rank {rank}/2: scripts/observe.py --x a b")
