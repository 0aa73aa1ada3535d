"""A rank is to the script what torchrun's is: compared point by point, on one script that looks around."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.references import torchrun
from support.runs import Run

LOOK = """
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
    "numpy": numpy.random.randint(1 << 30),
    "python_random": __import__("random").random(),
    "initialized": torch.distributed.is_initialized(),
    "parent": os.getppid(),
    "title": open("/proc/self/cmdline").read().replace(chr(0), " ").strip(),
}
def function(): pass
import pickle
here["pickles_main"] = pickle.loads(pickle.dumps(function)) is function
json.dump(here, open(os.path.join(os.environ["LOOK_OUT"], f"rank{rank}.json"), "w"))
"""

DRAWN = ("numpy", "python_random", "torch_seed")
"""What an unseeded generator gives, so different in each process."""

DIFFER_BY_NATURE = {
    "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "LOOK_OUT", "MASTER_ADDR",
    "TORCHELASTIC_MAX_RESTARTS", "_", "PYTEST_CURRENT_TEST", "TORCH_FR_BUFFER_SIZE",
}  # fmt: skip
"""Ports, ids and paths of one run; our restart budget; what the shell leaves behind; how much of the collectives' record
is kept, which torch reads and scripts do not."""


@pytest.fixture
def looks(runs: Callable[..., Run], tmp_path: Path) -> dict[str, list[dict[str, Any]]]:
    """What the script saw, by launcher and rank."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "look.py").write_text(LOOK)
    command = ["--nproc-per-node", "2", "scripts/look.py", "--x", "a b", ""]
    seen: dict[str, list[dict[str, Any]]] = {}
    for launcher in ("torchrun", "ours", "fresh"):
        out = tmp_path / launcher
        out.mkdir()
        environment = {"LOOK_OUT": str(out), "OMP_NUM_THREADS": "1"}
        if launcher == "torchrun":
            torchrun(tmp_path, command, environment=environment)
        else:
            extra = ["--no-preload"] if launcher == "fresh" else []
            run = runs(*extra, *command, name=f"run-{launcher}", environment=environment).start()
            assert run.wait() == 0, run.tail()
        seen[launcher] = [json.loads((out / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    return seen


def test_rank_is_to_the_script_what_torchruns_is(looks: dict[str, list[dict[str, Any]]]) -> None:
    """Environment, arguments, module, session, signals, threads, generators: equal in all three ways to start."""
    for launcher in ("ours", "fresh"):
        for reference, ours in zip(looks["torchrun"], looks[launcher], strict=True):
            for name in set(reference) - {"environment", *DRAWN, "parent", "title"}:
                assert ours[name] == reference[name], (launcher, name)
            left = {k: v for k, v in reference["environment"].items() if k not in DIFFER_BY_NATURE}
            right = {
                k: v
                for k, v in ours["environment"].items()
                if k not in DIFFER_BY_NATURE and not k.startswith("GRPO_RUN_")
            }
            assert right == left, launcher
            assert set(reference["environment"]) - set(ours["environment"]) <= {"_"}


def test_unseeded_generators_differ_between_ranks(looks: dict[str, list[dict[str, Any]]]) -> None:
    """Forked from one server, ranks must not share torch's, numpy's and random's state."""
    for name in DRAWN:
        first, second = looks["ours"]
        assert first[name] != second[name], name


def test_title_names_run_rank_and_script(looks: dict[str, list[dict[str, Any]]]) -> None:
    """`ps` shows which rank of which script a process is."""
    for rank, ours in enumerate(looks["ours"]):
        assert ours["title"].startswith(f"grpo-run rank {rank}/2: scripts/look.py --x a b")
