"""Data only: the generated alert rules and their tests, from `dashboards/provisioning/_alerts.py`."""
