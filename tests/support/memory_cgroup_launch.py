"""`grpo-run` in a memory cgroup: python -P tests/support/memory_cgroup_launch.py FOLDER launch …"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    with open(f"{sys.argv[1]}/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
    del sys.argv[1]
    from grpo_run.cli.main import main

    sys.exit(main())
