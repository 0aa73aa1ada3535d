"""Metrics, dashboards, alerts and pictures of a run.

May import `runtime` and `watchdog`. Start reading at `metrics/catalogue.py` for what Prometheus can query,
`provisioning/` for the Grafana dashboard and the alert rules, `incident_report/page.py` for the HTML report
of an incident, `reward_plot.py` for the picture of a run, and `terminal/` for the output of `grpo-run
launch`. `grafana/` and `prometheus/` hold the generated files.
"""
