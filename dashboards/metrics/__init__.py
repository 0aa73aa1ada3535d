"""Prometheus metrics of a run: their definitions, how they are read, and the HTTP server.

Start with `catalogue.py`, the table of all metrics. One that ranks publish or log is a row of
`watchdog/rank_metrics.py`; to add another, add an entry there. `_memory.py` and `_collectives.py` are parts
of the table, `_collector.py` evaluates it for every scrape, `server.py` serves the page, and `address.py`
opens the port. Stores nothing.
"""
