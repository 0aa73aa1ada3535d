"""One live run trains into an output directory, whatever the order of launches."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_run.runtime.claims import claim
from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.history.run_directory import RunDirectory

KINDS = ("same", "other arguments", "fresh", "resume-from")


class Launch:
    """A launch: the lock of its run directory, as its supervisor holds it, and its claims."""

    def __init__(self, folder: Path, name: str) -> None:
        self.run_id = name
        self.run = RunDirectory(path=folder / "runs" / name)
        self.run.create()
        self.lock: int | None = None
        self.refused = ""

    def start(self, output_dir: Path, claims: Path) -> None:
        """Become live and claim the directory; end if it is refused."""
        try:
            self.lock = self.run.acquire()
            assert claim(str(output_dir), self.run, self.run_id, folder=claims) is None
        except UsageError as error:
            self.refused = str(error)
            self.end()

    @property
    def trains(self) -> bool:
        """Whether it is live."""
        return self.lock is not None

    def end(self) -> None:
        """End, or be killed: the kernel releases the lock."""
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all pairs share, as users do."""
    return tmp_path_factory.mktemp("claims")


@settings(max_examples=3 * settings.default.max_examples)
@given(
    number=st.integers(0, 2**62), kind=st.sampled_from(KINDS), killed=st.booleans(), at_once=st.booleans(),
    through_link=st.booleans(), other_directory=st.booleans(),
)  # fmt: skip
def test_of_two_launches_one_trains_and_the_other_names_it(
    folder: Path, *, number: int, kind: str, killed: bool, at_once: bool, through_link: bool,
    other_directory: bool,
) -> None:  # fmt: skip
    """Pairs: the same command, other arguments, `--fresh`, `--resume-from`; one killed; in one moment;
    through a symbolic link; in different directories. Never are two live in one directory.
    """
    home = folder / f"{number}-{KINDS.index(kind)}{killed:d}{at_once:d}{through_link:d}{other_directory:d}"
    claims, out = folder / "claims", home / "out"
    out.mkdir(parents=True, exist_ok=True)
    first = Launch(home, "run")
    second = first if kind == "same" else Launch(home, f"run-{kind}")
    if kind == "same":
        second = Launch.__new__(Launch)
        second.run_id, second.run, second.lock, second.refused = "run", first.run, None, ""
    where = home / "else" if other_directory else out
    if through_link and not other_directory:
        where = home / "link"
        with contextlib.suppress(FileExistsError):
            where.symlink_to(out)
    both = [first, second]
    try:
        if at_once and not killed:
            threads = [
                threading.Thread(target=one.start, args=(place, claims))
                for one, place in ((first, out), (second, where))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        else:
            first.start(out, claims)
            if killed:
                first.end()
            second.start(where, claims)
        live = [one for one in both if one.trains]
        free = other_directory and kind != "same"
        assert len(live) == (2 if free and not killed else 1)
        for one in both:
            if one.refused:
                assert str(live[0].run.path) in one.refused
                assert str(os.getpid()) in one.refused
                assert "--fresh" not in one.refused
                assert "grpo-run stop" in one.refused
        if killed:
            assert second.trains
    finally:
        for one in both:
            one.end()


def test_a_folder_that_cannot_be_used_is_said_and_refuses_nothing(tmp_path: Path) -> None:
    """Nobody watches for a second run then."""
    launch = Launch(tmp_path, "run")
    launch.lock = launch.run.acquire()
    (tmp_path / "file").touch()
    said = claim("out", launch.run, "run", folder=tmp_path / "file")
    launch.end()
    assert said is not None
    assert "a second run in out would not be noticed" in said


def test_a_damaged_claim_is_no_claim_and_dead_ones_are_removed(tmp_path: Path) -> None:
    """A claim counts as long as its supervisor lives."""
    launch, other = Launch(tmp_path, "run"), Launch(tmp_path, "other")
    claims = tmp_path / "claims"
    other.start(tmp_path / "elsewhere", claims)
    other.end()
    (claims / f"{'0' * 16}.{os.getuid()}").write_text("{")
    launch.start(tmp_path / "out", claims)
    assert launch.trains
    launch.end()
    assert len(list(claims.iterdir())) == 1
    assert oct(claims.stat().st_mode)[-4:] == "1777"
