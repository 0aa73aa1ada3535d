"""Generators of the Grafana dashboards, the Prometheus alert rules and the page of metrics.

Start with `generate.py`, which writes `dashboards/grafana/` and `dashboards/prometheus/alerts.yml`. Each
dashboard has a module with its panels: `_overview.py`, `_ranks.py`, `_memory.py` and `_learning.py`;
`_panels.py` has the kinds of panels, `_grafana.py` the pages around them. `_alerts.py` holds the alert rules.
May import `dashboards/metrics/`, `runtime/` and `watchdog/`. Not used while a run is supervised.
"""
