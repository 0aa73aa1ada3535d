"""Builders for tests of the deciders: values only."""
