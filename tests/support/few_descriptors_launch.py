"""`grpo-run` with 256 descriptors at most, as after `ulimit -n 256`.

python -P tests/support/few_descriptors_launch.py launch …
"""

from __future__ import annotations

import resource
import sys

DESCRIPTORS = 256

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    from grpo_run.cli.main import main

    sys.exit(main())
