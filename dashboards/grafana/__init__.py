"""Data only: the generated Grafana dashboard. The generator is `dashboards/provisioning/_grafana.py`."""
