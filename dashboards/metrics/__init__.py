"""Prometheus metrics of a run: their definitions, how they are read, and the HTTP server.

May import `runtime`, `watchdog` and `prometheus_client`; starlette and uvicorn only inside the server's
thread. Start reading at `catalogue.py`, the table of all metrics. `labels.py` holds the closed sets of label
values, `readings.py` computes each metric's samples, `metric.py` defines the types, `collector.py` evaluates
the table for every scrape, `server.py` serves it and `address.py` opens its port. To add a metric, add an
entry to `catalogue.py`.
"""
