"""Evidence of an incident, written to disk before any rank is terminated.

Start with `collection.py` (`collect`). `stack_capture.py` asks ranks for their stacks and runs py-spy,
`process_files.py` and `node_memory.py` read /proc and the GPU driver, `stacks.py` parses and groups stacks,
and `incident_files.py` manages the incident's directory. Imports `grpo_run.watchdog.processes`, `cgroups`,
`verdict`, `observation` and `rank_names`. Does not judge (`watchdog.diagnosis`).
"""
