"""Data only: the generated Grafana dashboards. The generator is `dashboards/provisioning/_grafana.py`."""
