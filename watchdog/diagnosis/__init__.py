"""Diagnosis: turns exits, proved deadlocks and stalls into verdicts.

`exits.py` decides which of several failed ranks failed first, `lost_peers.py` which of them only lost a connection; `hangs.py` gives deadlocks and stalls the form
of a verdict, with the line of user code of every rank concerned. Pure; may import everything else in
`grpo_run.watchdog`. Called by the incident investigation (`runtime.supervision`) once evidence is on disk.
"""
