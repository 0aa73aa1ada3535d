"""Errors of wandb's configuration."""


class ConfigError(Exception):
    """A value was changed."""
