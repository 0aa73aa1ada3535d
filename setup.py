"""What pyproject.toml cannot say: the packages, and a description without links that lead nowhere.

`runtime/board/` is installed as `grpo_run.runtime.board`. A package index shows the README without the files
around it, so links to them are shown as text, and pictures are left out.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

FOLDERS = ("cli", "dashboards", "runtime", "trainers", "watchdog")
README = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
PICTURE = re.compile(r"!\[[^\]]*\]\((?!https?:)[^)]+\)")
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)[^)]+\)")

setup(
    packages=["grpo_run"]
    + [f"grpo_run.{name}" for folder in FOLDERS for name in find_packages(include=[folder, f"{folder}.*"])],
    long_description=LINK.sub(r"\1", PICTURE.sub("", README)),
    long_description_content_type="text/markdown",
)
