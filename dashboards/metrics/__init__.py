"""Prometheus metrics of a run: their definitions, how they are read, and the HTTP server.

May import `runtime`, `watchdog` and `prometheus_client`. Start reading at `catalogue.py`, the table of all
metrics. `labels.py` holds the closed sets of label values, `readings.py` computes each metric's samples,
`metric.py` defines the types, `collector.py` evaluates the table for every scrape, `server.py` has the pages,
`serving/` the connections, and `address.py` opens the port. To add a metric, add an entry to
`catalogue.py`.
"""
