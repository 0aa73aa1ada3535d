"""Data only: template, style sheet and script of the incident report, read by `page.py`."""
