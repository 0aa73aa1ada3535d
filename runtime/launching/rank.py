"""The entry of a rank's process: the bootstrap, with the features. Started by torch's agent in a fork of the
warm interpreter or as a fresh one, see `runtime/processes/`.
"""

from __future__ import annotations

from typing import NoReturn

from grpo_run.runtime.features import modules
from grpo_run.runtime.rank import bootstrap

FEATURES = tuple(module.PART for module in modules("rank"))


def main() -> NoReturn:
    """Run the script and exit the process with its exit code. Does not return."""
    bootstrap.main(FEATURES, entry=f"{__name__}:main")
