"""Every option of the installed torchrun is honoured or refused: a case of each, by the name of its value."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.builders.launch_commands import error, prepare
from support.transcripts import Story, read, stories
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry
from torch.distributed.run import get_args_parser

from grpo_run.cli.launching.command import parse
from grpo_run.cli.launching.options import build_parser
from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.launch.config import Output
from grpo_run.runtime.launching import _ranks, torchrun
from grpo_run.runtime.launching._configuration import PreparedLaunch
from grpo_run.runtime.launching.torchrun import REFUSALS
from grpo_run.runtime.rank import bootstrap
from grpo_run.runtime.upstream import torch_names


class Started(SimpleNamespace):
    """What a command has led to: the parsed command, torch's specification of the workers, its rendezvous."""

    launch: PreparedLaunch
    spec: Any
    rendezvous: RendezvousParameters


Start = Callable[..., Started]


@pytest.fixture
def start(here: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Check a command and build the agent; no rendezvous is opened."""
    asked: list[RendezvousParameters] = []

    def handler(parameters: RendezvousParameters) -> SimpleNamespace:
        asked.append(parameters)
        return SimpleNamespace(get_backend=lambda: parameters.backend, get_run_id=lambda: parameters.run_id)

    monkeypatch.setattr(rendezvous_registry, "get_rendezvous_handler", handler)
    monkeypatch.delenv(torchrun.SHUTDOWN_VARIABLE, raising=False)

    def run(*words: str) -> Started:
        launch = prepare([*words, "train.py"])
        supervisor: Any = SimpleNamespace(config=launch.config, history=SimpleNamespace(fresh_because=""))
        agent = _ranks.build_agent(launch, supervisor, SimpleNamespace(), {})  # type: ignore[arg-type]
        group = agent.get_worker_group()
        return Started(launch=launch, spec=group.spec, rendezvous=asked[-1], environment=agent._environment)

    return run


HONOURED = [story.title for story in read(Path(__file__).with_name("torchrun.txt"))]
ELSEWHERE = {
    "help": "test_options.py", "module": "test_same_run.py", "training_script": "test_values.py",
    "training_script_args": "test_values.py",
    "numa_binding": "below: it needs GPUs",
}  # fmt: skip


def test_every_option_of_the_installed_torchrun_has_a_case() -> None:
    """An option of a new torch fails here until somebody has decided what becomes of it."""
    assert {action.dest for action in get_args_parser()._actions} == {*HONOURED, *REFUSALS, *ELSEWHERE}


class StartShell:
    """Commands of `launch`, and what has arrived where an option acts."""

    def __init__(self, start: Start) -> None:
        self.begin = start

    def start(self, text: str, *ways: str) -> str:
        """Start with these words; show what is found in these places."""
        found: list[Any] = [self.begin(*text.split())] * len(ways)
        for place, way in enumerate(ways):
            for name in way.split("."):
                one = found[place]
                found[place] = one.get(name) if isinstance(one, dict) else getattr(one, name)
        return " ".join(str(one) for one in found)


@stories(__file__, "torchrun.txt")
def test_an_option_is_honoured(
    story: Story, word: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its value arrives where it acts, and differs from the default."""
    monkeypatch.setattr("grpo_run.cli.launching.command.output_form", lambda: Output.lines)
    story.check(StartShell(start), word)
    (_, without), (_, arrived) = story.exchanges
    assert without != arrived


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", REFUSALS)
def test_an_option_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line that says what, why and what to do; also if a variable asks for it."""
    action = next(action for action in build_parser()._actions if action.dest == name)
    words = [action.option_strings[0], *(["x"] if action.nargs != 0 else []), "train.py"]
    said = error(*words)
    assert said.startswith(f"--{name.replace('_', '-')} is not supported: ")
    assert "\n" not in said
    if name not in ("logs_specs", "numa_binding"):
        monkeypatch.setenv(f"PET_{name.upper()}", "1")
        assert error("train.py") == said


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ((), None),
        (("--redirects", "3"), set()),
        (("--redirects", "3", "--tee", "1:3"), {1}),
        (("--redirects", "0:3,1:0", "--local-ranks-filter", "0,1"), {1}),
        (("--tee", "2"), {0, 1, 2}),
        (("--tee", "3", "--local-ranks-filter", "2"), {2}),
    ],
)
def test_local_ranks_are_shown_as_torchrun_shows_them(words: tuple[str, ...], shown: set[int] | None) -> None:
    """What is redirected is not shown, unless it is also to be shown."""
    options = parse([*words, "train.py"])[0].torchrun
    assert torchrun.shown_local_ranks(options, 3, None) == shown


def test_the_local_ranks_of_every_node_are_shown(start: Start) -> None:
    """A run shows ranks by their global numbers."""
    words = ("--nnodes", "2", "--nproc-per-node", "2", "--local-ranks-filter", "1")
    assert start(*words).launch.config.shown_ranks == {1, 3}


def test_an_unknown_handler_of_events_is_refused(start: Start) -> None:
    """torch would raise a KeyError when it records the first event."""
    with pytest.raises(UsageError, match=r"--event-log-handler loki: torch has no such handler"):
        start("--event-log-handler", "loki")


def test_a_variable_of_an_option_that_only_this_torch_has_is_refused(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the command line it is an unknown option."""
    parser = get_args_parser()
    parser.add_argument("--brand-new", default="1")
    monkeypatch.setattr("torch.distributed.run.get_args_parser", lambda: parser)
    start()
    monkeypatch.setenv("PET_BRAND_NEW", "1")
    with pytest.raises(UsageError, match=r"PET_BRAND_NEW is not supported with torch .*; unset it"):
        start()


def test_the_shutdown_timeout_yields_to_the_stop_timeout(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may also come from torch's variable."""
    monkeypatch.setenv(torchrun.SHUTDOWN_VARIABLE, "9")
    assert start().launch.config.timeouts.handler_seconds == 9
    timeouts = start("--shutdown-timeout", "7", "--stop-timeout", "40").launch.config.timeouts
    assert (timeouts.stop_seconds, timeouts.handler_seconds) == (40, 40)


@pytest.mark.full  # asks torch in another process
@pytest.mark.usefixtures("here")
def test_numa_binding_is_refused_where_torch_cannot_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here for want of `numactl`, or of a GPU."""
    monkeypatch.setenv("PATH", "")
    said = error("--numa-binding", "node", "train.py")
    assert said.startswith("--numa-binding node: ")
    assert said.endswith("; leave the option out")
    assert "\n" not in said


def test_numa_binding_binds_to_the_cpus_that_torch_chooses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch's own choice, for GPUs whose node is planted."""
    from torch.numa import binding

    monkeypatch.setattr(binding, "_get_numa_node_index_for_gpu_index", lambda *, gpu_index: 0)
    monkeypatch.setattr(binding.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("sys.argv", ["-c", "node", "2"])
    torch_names.print_numa_cpus()
    cpus = sorted(os.sched_getaffinity(0))
    assert capsys.readouterr().out == f"[{cpus}, {cpus}]\n"


@pytest.mark.usefixtures("here")
def test_each_rank_is_told_its_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its local number."""
    made = "[[0], [1]]"
    monkeypatch.setattr(
        torchrun.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=f"noise\n{made}\n")
    )
    launch = prepare(["--nproc-per-node", "2", "--numa-binding", "exclusive", "train.py"])
    assert launch.config.rank_cpus == ((0,), (1,))


def test_a_rank_uses_its_cpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound before anything else is done, so that its threads are too."""
    bound: list[object] = []
    settings = SimpleNamespace(cpus=(0, 3), preloaded=True)
    monkeypatch.setattr(bootstrap.RankSettings, "from_environment", lambda: settings)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *arguments: bound.append(arguments))
    with pytest.raises(AttributeError, match="log"):  # the settings end here
        bootstrap.main()
    assert bound == [(0, (0, 3))]
