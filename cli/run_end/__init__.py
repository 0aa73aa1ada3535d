"""After a run has ended: the command of `--on-end`, and the last scrapes of the metrics.

Start at `on_end.py`, which runs the command; `end_record.py` is what it is told. `last_scrapes.py` lets a regular
scraper read how the run has ended. Called by `launching/supervise.py` and `launch.py`. Nothing here changes how a run has ended.
"""
