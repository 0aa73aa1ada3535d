"""Data only: the templates and the style sheet of the pages in `dashboards/reports/`."""
