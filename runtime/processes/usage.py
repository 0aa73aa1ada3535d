"""Process trees of processes from /proc: everything that a rank has started, and its resource usage.

A process tree is the session that a rank leads and every session whose leader descends from it: `setsid`
leaves the session, but not the process tree. A process whose parents have all exited is lost, as in any walk
from child to parent. Called by `runtime.supervisor.detection.activity`. What cannot be read gives None,
"unknown". Does not judge.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from grpo_run.watchdog.processes import list_processes, read_io_bytes, read_stat
from grpo_run.watchdog.stalls.process_clocks import ThreadReading, TreeReading

MAX_THREADS = 1024
"""Threads of one process tree that are read; a process tree with more is unknown."""


def find_process_trees(leaders: Collection[int]) -> dict[int, list[int]]:
    """Return the processes of each session leader's tree, with one scan of /proc."""
    sessions: dict[int, list[int]] = {}
    session_of: dict[int, int] = {}
    for pid in list_processes():
        try:
            session = os.getsid(pid)
        except OSError:
            continue  # exited since it was listed, or asking is not permitted
        session_of[pid] = session
        sessions.setdefault(session, []).append(pid)
    tree_of = {leader: leader for leader in leaders}
    parents = {
        session: leader.parent
        for session in sessions
        if session not in tree_of and (leader := read_stat(session)) is not None
    }
    found = True
    while found:  # a session may be started from a session that was started from the rank
        found = False
        for session, parent in list(parents.items()):
            tree = tree_of.get(session_of.get(parent, -1))
            if tree is not None:
                tree_of[session] = tree
                del parents[session]
                found = True
    trees: dict[int, list[int]] = {leader: [] for leader in leaders}
    for session, tree in tree_of.items():
        trees[tree] += sessions.get(session, [])
    return trees


def read_tree_usage(members: Collection[int]) -> TreeReading | None:
    """Return what a process tree has used, also by children that have exited; None if a member may not be
    read, or none is left.
    """
    cpu_seconds, io_bytes, running = 0.0, 0, []
    for pid in members:
        process = read_stat(pid)
        if process is None or process.state == "Z":
            continue  # exited since it was listed
        member_bytes = read_io_bytes(pid)
        if member_bytes is None:
            if os.path.exists(f"/proc/{pid}"):
                return None
            continue
        io_bytes += member_bytes
        cpu_seconds += process.cpu_seconds + process.children_cpu_seconds
        running.append(pid)
    if not running:
        return None
    return TreeReading(members=frozenset(running), cpu_seconds=cpu_seconds, io_bytes=io_bytes)


def read_threads(members: Collection[int]) -> dict[int, ThreadReading] | None:
    """Return every thread of these processes by id, or None if there are too many or one may not be read."""
    threads: dict[int, ThreadReading] = {}
    for pid in members:
        try:
            numbers = os.listdir(f"/proc/{pid}/task")
        except FileNotFoundError:
            continue  # exited
        except OSError:
            return None
        if len(threads) + len(numbers) > MAX_THREADS:
            return None
        for number in numbers:
            stat = read_stat(pid, int(number))
            if stat is not None:  # else it ended since it was listed
                threads[int(number)] = ThreadReading(stat.state, stat.cpu_seconds, stat.name)
    return threads
