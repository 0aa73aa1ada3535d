"""Data only: the Grafana dashboards, as Grafana exports them. Edit them there or here."""
