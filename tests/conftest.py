"""Fixtures and options of all tests: repeatable property tests, a clean environment, warm starts."""

from __future__ import annotations

import gc
import itertools
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_randomly
from hypothesis import Phase, settings
from support import freezer, machines, references, warm, workers
from support.journal import read_records
from support.runs import Run, Runs

from grpo_run.runtime.history.journal import Journal

# no deadline, because the duration of an example depends on the machine; the same examples every time, so
# that a failure is caused by the change under test (`pytest --hypothesis-profile=explore` tries others)
settings.register_profile("grpo-run", deadline=None, max_examples=20, database=None, derandomize=True)
settings.register_profile("full", settings.get_profile("grpo-run"), max_examples=60)
settings.register_profile("explore", deadline=None, max_examples=1000)
# a failure is enough, the smallest example is not needed
settings.register_profile(
    "mutation",
    settings.get_profile("grpo-run"),
    phases=(Phase.explicit, Phase.generate),
    report_multiple_bugs=False,
)
settings.load_profile("grpo-run")


COLLECTED_WITH_TORCH = pytest.StashKey[bool]()


def reseed_torch(seed: int) -> None:
    """Seed torch's generator of the CPU before each test, if torch is imported."""
    if "torch" in sys.modules:
        # `torch.manual_seed` prepares all kinds of devices, three times a test
        sys.modules["torch"].default_generator.manual_seed(seed)


# otherwise pytest-randomly imports DeepSpeed for the same, and with it torch, into every process of pytest
pytest_randomly.entrypoint_reseeds = [reseed_torch]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of these tests."""
    parser.addoption("--cold", action="store_true", help="start no process from the warm launcher")
    parser.addoption(
        "--machine", type=int, metavar="SEED", help="draw the machine of the unit tests again; 0: this one"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Act on the options, and take signals as a terminal's foreground job does.

    `nohup` ignores SIGHUP, and a shell without job control ignores SIGINT in what it starts in the
    background; the programs under test would inherit both.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if "not full" not in config.option.markexpr and settings.get_current_profile_name() == "grpo-run":
        settings.load_profile("full")
    warm.always_cold = config.getoption("--cold")
    if not hasattr(config, "workerinput"):
        warm.remove_stale_locks()
        if (
            getattr(config.option, "numprocesses", None)
            and not workers.only_unit_tests(config)
            and not warm.always_cold
        ):
            warm.share()
    config.pluginmanager.register(Starts())
    config.pluginmanager.register(workers)
    config.pluginmanager.register(machines)
    machines.configure(config)


@pytest.fixture(autouse=True, scope="session")
def _collected_without_torch(request: pytest.FixtureRequest) -> None:
    """No file of real tests imports torch when it is collected: each worker would take seconds for it."""
    assert not request.config.stash[COLLECTED_WITH_TORCH] or not workers.only_real_tests(request.config), (
        "a test file imports torch when it is collected; import it where it is used"
    )


@pytest.fixture(autouse=True, scope="session")
def _references(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep references where all workers of the session find them."""
    base = tmp_path_factory.getbasetemp()
    references.cache = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "references"
    references.cache.mkdir(exist_ok=True)


@pytest.fixture(autouse=True, scope="session")
def _own_registry(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep the runs of tests out of the registry of the user who runs them."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Start every test in the environment that pytest was started in, as far as libraries read it at
    import.
    """
    warm.remove_variables_of_libraries()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude the libraries' objects from garbage collections, which otherwise visit them thousands of
    times.
    """
    session.config.stash[COLLECTED_WITH_TORCH] = "torch" in sys.modules
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the number of started processes to the controller."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["starts"] = dict(warm.starts)


class Starts:
    """Adds up the processes that workers started; registered where there are workers."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add the counts of a worker that has finished."""
        warm.starts.update(getattr(node, "workeroutput", {}).get("starts", {}))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how many processes were started, warm and cold."""
    if warm.starts:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(warm.starts.items()))
        terminalreporter.write_line(f"processes started: {counts}")


@pytest.fixture(autouse=True)
def _outside_any_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the variables of a launcher that runs the tests."""
    for name in list(os.environ):
        if name.startswith(("GRPO_RUN_", "PET_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that makes a new folder.

    `TempPathFactory.mktemp` reads the names of all folders that the session has made before, each time.
    """
    numbers = itertools.count()
    base = tmp_path_factory.getbasetemp()

    def make(name: str = "") -> Path:
        path = base / f"{next(numbers)}{name}"
        path.mkdir(mode=0o700)
        return path

    return make


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, make_folder: Callable[..., Path]) -> Path:
    """Return the folder of a test, as pytest's own fixture does."""
    return make_folder("-" + re.sub(r"\W", "_", request.node.name)[:26])


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """Return a journal with fixed clocks."""
    made = Journal(tmp_path / "journal.jsonl", "run-1", wall=lambda: 1000.0, monotonic=lambda: 10.0)
    made.attempt = 0
    return made


@pytest.fixture
def events(tmp_path: Path) -> Callable[[], list[dict[str, Any]]]:
    """Return a function that reads the journal."""
    return lambda: list(read_records(tmp_path / "journal.jsonl"))


@pytest.fixture
def frozen() -> Iterator[freezer.Freezer]:
    """Create a cgroup freezer, or skip the test."""
    reason = freezer.unsupported()
    if reason is not None:
        pytest.skip(reason)
    with freezer.freezer() as made:
        yield made


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    """Return a function that creates runs of real processes in the test's folder; kill them at the end."""
    made: list[Run] = []

    def make(*arguments: str, **options: Any) -> Run:
        run = Run(tmp_path, arguments, **options)
        made.append(run)
        return run

    yield make
    for run in made:
        run.close()
