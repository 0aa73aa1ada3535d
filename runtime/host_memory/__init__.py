"""Host memory while ranks run, as the supervisor observes it: samples, the last of them on disk, the ranks' cgroup.

Imports the watchdog and `runtime.errors` only. What follows from a lack of memory is decided in
`supervision/host_memory`. Start with `accounting.py`.
"""
