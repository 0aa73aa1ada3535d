"""`grpo-run` with other waiting times of the supervisor's draining, so that a test need not wait a minute for each.

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
