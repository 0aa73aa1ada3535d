"""Generators of the Grafana dashboard and the Prometheus alert rules.

Start with `generate.py`, which writes `dashboards/grafana/grpo-run.json` and
`dashboards/prometheus/alerts.yml`. `_alerts.py` holds the alert rules; `_grafana.py` assembles the dashboard
from the rows in `_rows.py` and the panel models in `_panels.py`; `_promql.py` checks every query against the
metric catalogue. May import `dashboards/metrics/`, `runtime/` and `watchdog/`. Not used while a run is
supervised.
"""
