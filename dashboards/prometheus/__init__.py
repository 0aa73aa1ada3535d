"""Data only: the generated alert rules and their tests. The generator is `dashboards/provisioning/alerts.py`."""
