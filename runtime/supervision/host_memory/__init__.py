"""Host memory of one run, and what the supervisor does about it: protection, samples, relief, and facts about kills.

Part of `runtime.supervision`; imports `runtime.host_memory`, the staging area and the record. Start with `watch.py`.
"""
