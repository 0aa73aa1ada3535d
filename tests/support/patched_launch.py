"""`grpo-run` with other timeouts of drains and restarts, so that tests wait seconds instead of minutes.

TEST_DRAINS='{"STALL_SECONDS": 2.0}' python -P tests/support/patched_launch.py launch …
"""

from __future__ import annotations

import json
import os
import sys

if __name__ == "__main__":
    from grpo_run.cli.main import main
    from grpo_run.runtime.snapshots import _drain_requests as drain_requests
    from grpo_run.runtime.snapshots import drain_scheduler, last_writes
    from grpo_run.runtime.supervisor import policy

    for name, value in json.loads(os.environ["TEST_DRAINS"]).items():
        known = (drain_requests, drain_scheduler, last_writes, policy)
        modules = [module for module in known if hasattr(module, name)]
        assert len(modules) == 1, name
        setattr(modules[0], name, value)
    sys.exit(main())
