"""Builders for tests of supervision, detection, staging and the record."""
