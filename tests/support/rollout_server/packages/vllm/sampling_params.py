"""A name that TRL imports."""


class StructuredOutputsParams:
    """Arguments of an engine that the stand-in does not have."""
