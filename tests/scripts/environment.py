"""Write this rank's environment to the given path, with `{rank}` replaced. Imports only the standard
library.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    Path(sys.argv[1].format(rank=os.environ.get("RANK", "0"))).write_text(json.dumps(dict(os.environ)))
