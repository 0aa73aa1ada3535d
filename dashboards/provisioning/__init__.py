"""Generators of the Grafana dashboard and the Prometheus alert rules.

Start with `generate.py`, which writes `dashboards/grafana/grpo-run.json` and
`dashboards/prometheus/alerts.yml`. `alerts.py` holds the alert rules; `grafana.py` assembles the dashboard
from the rows in `rows.py` and the panel models in `panels.py`; `promql.py` checks every query against the
metric catalogue. May import `dashboards/metrics/`, `runtime/` and `watchdog/`. Not used while a run is
supervised.
"""
