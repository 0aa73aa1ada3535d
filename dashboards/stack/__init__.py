"""Data only: the files around dashboards and alert rules that `grpo-run dashboards export` copies: a compose
file, and the configuration of Prometheus, Alertmanager and Grafana.
"""
