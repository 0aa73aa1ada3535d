"""Data only: the page, style sheet and script that `dashboards/live/server.py` sends."""
