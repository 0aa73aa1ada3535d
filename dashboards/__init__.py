"""Metrics, dashboards, alerts and reports of a run.

Start with `dashboards/metrics/catalogue.py` for what Prometheus can query, `live/` for the live page,
`reports/` for the reports of runs and incidents, and `terminal/` for the output of `grpo-run launch`.
`grafana/` holds the dashboards, `prometheus/` the alert rules and `stack/` what `grpo-run dashboards export`
adds. May import `runtime/` and `watchdog/`. Changes nothing of a run.
"""
