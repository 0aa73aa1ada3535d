"""`grpo-run` with other timeouts of the drain scheduler, so that tests wait seconds instead of minutes.

TEST_DRAINS='{"STALL_SECONDS": 2.0}' python -P tests/support/patched_launch.py launch …
"""

from __future__ import annotations

import json
import os
import sys

if __name__ == "__main__":
    from grpo_run.cli.main import main
    from grpo_run.runtime.staging import drain_scheduler

    for name, value in json.loads(os.environ["TEST_DRAINS"]).items():
        assert hasattr(drain_scheduler, name), name
        setattr(drain_scheduler, name, value)
    sys.exit(main())
