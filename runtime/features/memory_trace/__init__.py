"""Memory trace: name what keeps a script's memory alive, by the line that made it and its holder.

Start with `_tracer.py`, which looks at the memory after each step. `_census.py` finds what is alive and since
which step, `_holders.py` and `_referrers.py` find who holds it, and `_sites.py` where it was made.
`_finding.py` has the rule that makes a finding, and its sentences. `rank.py` connects them to the rank under
`--memory-trace`, and imports them only then.

`events.py` has the findings of all ranks, which `status` and reports list; `supervisor.py` prints the alarms.
Reads no source, and frees nothing.
"""
