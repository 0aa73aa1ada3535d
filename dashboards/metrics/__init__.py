"""Prometheus metrics of a run: their definitions, how they are read, and the HTTP server.

Start with `catalogue.py`, the table of all metrics; to add one, add an entry there. `metric.py` defines the
types and the closed sets of label values, `readings.py` and `memory.py` compute samples, `collector.py`
evaluates the table for every scrape, `server.py` has the pages, `http_server.py` the connections, and
`address.py` opens the port. May import `runtime/`, `watchdog/` and `prometheus_client`. Stores nothing.
"""
