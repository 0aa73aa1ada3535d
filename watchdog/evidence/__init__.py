"""Evidence of an incident, written to disk before any rank is terminated.

Start with `collection.py` (`collect`). `stack_capture.py` asks ranks for their stacks and runs py-spy,
`stacks.py` parses and groups stacks, `source.py` tells user code from libraries, `_node_memory.py` reads the
memory of the node and the GPU driver, `timeline.py` keeps the phases of the last minutes, and
`incident_files.py` manages the incident's directory. Imports the modules of `watchdog/` and
`watchdog/memory/`. Does not judge (`watchdog/diagnosis/`).
"""
