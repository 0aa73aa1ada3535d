"""Host memory of one run, as the supervisor acts on it: protection of the supervisor, samples, and facts about kills.

Part of `runtime.supervision`; imports `runtime.host_memory`, the staging area and the record. Start with `watch.py`.
"""
