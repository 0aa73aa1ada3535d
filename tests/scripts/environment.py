"""Writes what this rank's environment is to the path given, with `{rank}` replaced. Imports nothing heavy."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    Path(sys.argv[1].format(rank=os.environ.get("RANK", "0"))).write_text(json.dumps(dict(os.environ)))
