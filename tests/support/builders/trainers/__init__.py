"""Builders for tests of what happens in a rank."""
