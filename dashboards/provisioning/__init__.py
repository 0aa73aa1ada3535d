"""Generators of the Grafana dashboard and the Prometheus alert rules.

May import `dashboards.metrics`, `runtime` and `watchdog`. Start reading at `generate.py`, which writes
`dashboards/grafana/grpo-run.json` and `dashboards/prometheus/alerts.yml`. `alerts.py` holds the alert rules;
`grafana.py` assembles the dashboard from the rows in `rows.py` and the panel models in `panels.py`;
`promql.py` checks every query against the metric catalogue.
"""
