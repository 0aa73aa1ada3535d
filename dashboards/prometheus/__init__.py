"""Data only: the alert rules, `alerts.yml`. A test compares them with docs/reference/alerts.md."""
