"""`grpo-run` as some tests need it: python -P tests/support/special_launch.py HOW [ARGUMENTS] launch …

    cgroup FOLDER              in a memory cgroup
    container PRIVATE COMMON   in a mount namespace of its own, where PRIVATE lies at a path that other
                               containers have too
    patched                    with other timeouts of drains and restarts, so that tests wait seconds instead
                               of minutes: TEST_DRAINS='{"STALL_SECONDS": 2.0}'
    fsdp_on_cpu                does not refuse FSDP without an accelerator: the scripts' shim shards on CPU
    bound                      as on a machine whose GPUs are beside the last CPU
    failing                    the supervisor fails in the hang detector once a file `fail` exists

Nothing of grpo-run is imported before namespaces are entered.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

CLONE_NEWNS = 0x00020000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18


def cgroup(folder: str) -> None:
    """Enter a cgroup."""
    Path(folder, "cgroup.procs").write_text(str(os.getpid()))


def container(private: str, common: str) -> None:
    """Bind `private` to `common` for this process and its children, and change to it."""
    libc = ctypes.CDLL(None, use_errno=True)
    calls = (
        lambda: libc.unshare(CLONE_NEWNS),
        lambda: libc.mount(b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None),
        lambda: libc.mount(os.fsencode(private), os.fsencode(common), None, ctypes.c_ulong(MS_BIND), None),
    )
    for call in calls:
        if call() != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    os.chdir(common)


def patched() -> None:
    """Change constants of the product, each of which must exist once."""
    from grpo_run.runtime.launching import notifications
    from grpo_run.runtime.snapshots import _drain_requests as drain_requests
    from grpo_run.runtime.snapshots import drain_scheduler, last_writes
    from grpo_run.runtime.supervisor import policy

    for name, value in json.loads(os.environ["TEST_DRAINS"]).items():
        known = (drain_requests, drain_scheduler, last_writes, notifications, policy)
        (module,) = [module for module in known if hasattr(module, name)]
        setattr(module, name, value)


def fsdp_on_cpu() -> None:
    """Do not refuse a file with FSDP."""
    from grpo_run.runtime.launch import accelerate

    refused = dict(accelerate.NEED_ACCELERATOR)
    del refused["FSDP"]
    accelerate.NEED_ACCELERATOR = refused  # type: ignore[misc]


def bound() -> None:
    """Let `--numa-binding` choose the last CPU for every rank, as if all GPUs were beside it."""
    from grpo_run.runtime.launching import _configuration

    _configuration.numa_cpus = lambda options, ranks: ((max(os.sched_getaffinity(0)),),) * ranks


def failing() -> None:
    """Let the hang detector raise once a file `fail` exists."""
    from grpo_run.runtime.supervisor.detection.detector import HangDetector

    original = HangDetector.scan

    def raising(self: Any, *arguments: Any) -> Any:
        if Path("fail").exists():
            raise KeyError("a rank that is not there")
        return original(self, *arguments)

    HangDetector.scan = raising  # type: ignore[method-assign]


if __name__ == "__main__":
    prepare = {one.__name__: one for one in (cgroup, container, patched, fsdp_on_cpu, bound, failing)}[
        sys.argv[1]
    ]
    count = prepare.__code__.co_argcount
    prepare(*sys.argv[2 : 2 + count])
    del sys.argv[1 : 2 + count]
    from grpo_run.cli.main import main

    sys.exit(main())
