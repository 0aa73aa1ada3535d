"""Serving: connections of the metrics server, bounded in number, size and time.

Start with `http_server.py`, which reads and writes all of them; `http_messages.py` is what is read and written. Imports
nothing of this project: `dashboards/metrics/server.py` passes in what answers a request.
"""
