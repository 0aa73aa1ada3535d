"""A script of many files: those are found that set an attribute or bound it, wherever they were imported."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_run.runtime.rank.memory_trace import script_files
from grpo_run.runtime.rank.memory_trace.container_bounds import is_bounded
from grpo_run.runtime.rank.memory_trace.other_code import is_chain_cut
from grpo_run.runtime.rank.memory_trace.script_files import MOST_PARSED, sources_with, user_files, where_set
from grpo_run.runtime.rank.memory_trace.sources import Variable
from grpo_run.runtime.rank.memory_trace.tensor_bounds import is_graph_cut, is_length_bounded

MANY = 3 * MOST_PARSED
OWN = "class Buffer:\n    def __init__(self):\n        self.items_of_test = []\n"
Import = Callable[[str], str]


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Import:
    """Adds a module with some source to those that the script has imported; returns its file."""

    def add(source: str) -> str:
        name = f"module_{len(list(tmp_path.iterdir()))}_of_test"
        file = tmp_path / f"{name}.py"
        file.write_text(source)
        module = types.ModuleType(name)
        module.__file__ = str(file)
        monkeypatch.setitem(sys.modules, name, module)
        return str(file)

    return add


def test_the_last_of_many_files_that_sets_an_attribute_is_found(imported: Import) -> None:
    """Where a model's attribute is set does not depend on what was imported before."""
    for number in range(MANY):
        imported(f"number = {number}\n")
    file = imported("def train(model):\n    model.set_by_test = []\n")
    assert where_set(Variable("", "set_by_test", owner="Linear")).file == file


def test_the_last_of_many_files_that_bounds_something_is_found(imported: Import) -> None:
    """Or a buffer that is trimmed there would be a leak."""
    buffer = Variable(imported(OWN), "items_of_test", owner="Buffer")
    for number in range(MANY):
        imported(f"number = {number}\n")
    assert not is_bounded(buffer, user_files())
    imported("def trim(buffer):\n    buffer.items_of_test.pop()\n")
    assert is_bounded(buffer, user_files())


def test_a_function_in_another_file_bounds_what_it_is_given(imported: Import) -> None:
    """That file may use another name for it."""
    file = imported("from other import trim_of_test\nkept = []\ndef step():\n    trim_of_test(kept)\n")
    assert not is_bounded(Variable(file, "kept"), user_files())
    imported("def trim_of_test(items):\n    del items[:-8]\n")
    assert is_bounded(Variable(file, "kept"), user_files())


def test_a_module_that_replaces_another_is_read(imported: Import, tmp_path: Path) -> None:
    """The number of modules is the same as before."""
    imported("")
    user_files()
    name = "module_0_of_test"
    other = tmp_path / "other.py"
    other.write_text("")
    sys.modules[name].__file__ = str(other)
    assert str(other) in user_files()


def test_nothing_is_held_against_a_name_that_too_many_files_use(imported: Import) -> None:
    """What is not read may bound it: better late than false."""
    buffer = Variable(imported(OWN), "items_of_test", owner="Buffer")
    for number in range(MOST_PARSED + 1):
        imported(f"def show(buffer):\n    print(buffer.items_of_test, {number})\n")
    files = user_files()
    assert is_bounded(buffer, files)
    assert is_length_bounded(buffer, files)
    assert is_graph_cut(buffer, files)
    assert is_chain_cut(frozenset({"items_of_test"}), files)


def test_methods_and_packages_of_the_same_name_are_not_what_is_held(imported: Import) -> None:
    """No tensor or container can be called, so `assert mask.all() == 1` says nothing of an attribute `all`."""
    tensor = Variable(
        imported("class Buffer:\n    def add(self, x):\n        self.all = torch.cat([self.all, x])\n"),
        "all",
        owner="Buffer",
    )
    container = Variable(imported(OWN), "items_of_test", owner="Buffer")
    for _ in range(MOST_PARSED + 1):
        imported(
            "from package.all import one\nfrom package.items_of_test import two\n"
            "def check(mask):\n    return mask.all() > 1, len(mask.items_of_test()) > 1\n"
        )
    imported(  # one that is parsed, because it has the attributes of something, too
        "def show(it):\n    print(it.all, it.items_of_test)\n"
        "    assert it.mask.all().backward() < it.mask.all()[1:].detach()\n    assert len(it.items_of_test()) > 1\n"
    )
    files = user_files()
    assert not is_length_bounded(tensor, files)
    assert not is_graph_cut(tensor, files)
    assert not is_bounded(container, files)
    imported("def trim(it):\n    it.all = it.all[-8:]\n    it.items_of_test.pop()\n    it.all.backward()\n")
    files = user_files()
    assert is_length_bounded(tensor, files)
    assert is_graph_cut(tensor, files)
    assert is_bounded(container, files)


@pytest.mark.parametrize(
    "use", ["print(it.kept_of_test [0])", "it . kept_of_test.pop()", "it.\\\n  kept_of_test\\\n  .pop()"]
)
def test_a_use_that_looks_like_a_method_is_read(imported: Import, use: str) -> None:
    """Or what bounds a buffer would be overlooked."""
    imported(f"def use(it):\n    {use}\n    it.other(it.kept_of_test); it.kept_of_test()\n")
    assert sources_with(user_files(), attributes=["kept_of_test"])


def test_only_files_that_mention_a_name_are_parsed(imported: Import, monkeypatch: pytest.MonkeyPatch) -> None:
    """To parse all files of a large script would take seconds."""
    name = f"set_by_test_{MOST_PARSED}"  # this file does not have it
    file = imported(f"def train(model):\n    model . {name} = []\n")
    imported(f"{name} = 1\n")
    parsed: list[str] = []
    real = script_files.parsed
    monkeypatch.setattr(script_files, "parsed", lambda file: parsed.append(file) or real(file))
    assert where_set(Variable("", name, owner="Linear")).file == file
    assert parsed == [file]
