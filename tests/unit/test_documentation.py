"""The documentation names files that exist, and its drawings agree with the sources."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import command_line_page
from support.import_graph import PACKAGES, PAGE, REPOSITORY, page, reduced
from support.imports import facts

DOCS = REPOSITORY / "docs"
PAGES = [REPOSITORY / "README.md", *sorted(DOCS.rglob("*.md"))]
TESTS = ("unit", "integration", "fault", "hosts", "browser")
TOP_LEVEL = (*PACKAGES, *TESTS, "tests", "docs", "benchmarks", "examples")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_every_file_that_a_page_names_exists(path: Path) -> None:
    """A path in backticks that begins with a folder of the repository, or of its tests, leads to a file or a
    folder.
    """
    named = re.findall(rf"`((?:{'|'.join(TOP_LEVEL)})/[\w./-]*)[`:]", path.read_text(encoding="utf-8"))
    folders = (REPOSITORY, REPOSITORY / "tests")
    assert [name for name in named if not any((folder / name).exists() for folder in folders)] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(path: Path) -> None:
    """Links to other sites are not followed."""
    links = re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", path.read_text(encoding="utf-8"))
    missing = [
        f"{name}#{anchor}"
        for name, anchor in links
        if not (target := path.parent / name if name else path).exists()
        or (anchor and anchor not in anchors(target))
    ]
    assert missing == []


def anchors(path: Path) -> list[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_the_index_of_decisions_links_every_section_and_has_no_entry_itself() -> None:
    """An entry belongs to the page of its concept in `docs/decisions`."""
    index = (DOCS / "decisions.md").read_text(encoding="utf-8")
    linked = re.findall(r"\]\((decisions/[\w-]+\.md#[^)]+)\)", index)
    sections = [
        f"decisions/{path.name}#{anchor}"
        for path in (DOCS / "decisions").glob("*.md")
        for anchor in anchors(path)[1:]
    ]
    assert sorted(linked) == sorted(sections)
    assert "**" not in index, "move these entries to a page in docs/decisions; drop those that it has already"


def test_the_drawings_of_the_architecture_are_current() -> None:
    """`make generated` writes them."""
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text


def test_the_options_in_the_documentation_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make generated` writes them, at 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    text = command_line_page.PAGE.read_text(encoding="utf-8")
    assert command_line_page.page(text) == text
    text = command_line_page.TORCHRUN_PAGE.read_text(encoding="utf-8")
    assert command_line_page.torchrun_page(text) == text


def test_a_circle_is_refused() -> None:
    """The check above can fail."""
    with pytest.raises(ValueError, match="a -> b -> a"):
        reduced({"a": {"b"}, "b": {"a"}})


def test_folders_are_flat_and_modules_have_a_size_that_a_reader_holds() -> None:
    """At most 28 modules in a folder, and 620 lines in a module; no folder deeper than
    `runtime/features/quarantine/`.
    """
    files = [path for package in PACKAGES for path in (REPOSITORY / package).rglob("*.py")]
    crowded = {file.parent for file in files if len(list(file.parent.glob("*.py"))) > 29}
    long = [file for file in files if len(file.read_text(encoding="utf-8").splitlines()) > 620]
    deep = [file for file in files if len(file.relative_to(REPOSITORY).parts) > 4]
    assert (crowded, long, deep) == (set(), [], [])


def test_every_module_that_a_docstring_names_exists() -> None:
    """`x.py` in a docstring is a module of ours: in the same folder, or by its path in the repository."""
    missing = {
        (str(file.relative_to(REPOSITORY)), name)
        for package in PACKAGES
        for file in (REPOSITORY / package).rglob("*.py")
        for name in re.findall(r"(?<!`)`([\w/]+\.py)`(?!`)", "\n".join(facts(file).docstrings))
        if not (file.parent / name).exists() and not (REPOSITORY / name).exists() and name not in NO_MODULES
    }
    assert missing == set()


NO_MODULES = {"train.py", "script.py", "reward.py", "rewards.py", "trl/trainer/grpo_trainer.py"}
"""Names that stand for files of a user or of a library."""
