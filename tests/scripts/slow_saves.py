"""The plain GRPO script with a model that takes long to save: `--save-seconds`, and as long as the file
`hold-save` exists.

It creates the file `saving` when a save begins. All other arguments are those of `grpo.py`.
"""

from __future__ import annotations

import argparse
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from trl import GRPOTrainer

parser = argparse.ArgumentParser(add_help=False)
parser.add_argument("--save-seconds", type=float, default=0.0)
arguments, sys.argv[1:] = parser.parse_known_args()
save_model = GRPOTrainer.save_model


def save_slowly(self: Any, *args: Any, **kwargs: Any) -> Any:
    Path("saving").touch()
    time.sleep(arguments.save_seconds)
    deadline = time.monotonic() + 120.0
    while Path("hold-save").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return save_model(self, *args, **kwargs)


GRPOTrainer.save_model = save_slowly
runpy.run_path(str(Path(__file__).with_name("grpo.py")), run_name="__main__")
