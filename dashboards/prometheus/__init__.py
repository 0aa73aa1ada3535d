"""Data only: the alert rules, `alerts.yml`. `make generated` writes docs/reference/alerts.md from them."""
