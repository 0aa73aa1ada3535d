"""Metrics, dashboards, alerts and pictures of a run.

Start with `dashboards/metrics/catalogue.py` for what Prometheus can query, `provisioning/` for the Grafana
dashboards and the alert rules, `live/` for the live page, `reports/` for the reports of runs and incidents,
`reward_plot.py` and `memory_plot.py` for pictures, and `terminal/` for the output of `grpo-run launch`.
`grafana/` and `prometheus/` hold the generated files, `stack/` what
`grpo-run dashboards export` adds. May import `runtime/` and `watchdog/`. Changes
nothing of a run.
"""
