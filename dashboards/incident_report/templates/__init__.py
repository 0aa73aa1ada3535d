"""Data only: the template, style sheet and script of `dashboards/incident_report/page.py`."""
