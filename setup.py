"""Find the packages: `runtime/board/` is installed as `grpo_run.runtime.board`. Everything else is in
pyproject.toml.
"""

from setuptools import find_packages, setup

FOLDERS = ("cli", "dashboards", "runtime", "trainers", "watchdog")

setup(
    packages=[
        f"grpo_run.{name}" for folder in FOLDERS for name in find_packages(include=[folder, f"{folder}.*"])
    ]
)
