"""A server that answers AsyncGRPO without a model, and the part of the package `aiohttp` that TRL needs.

`server.py` answers, `packages` is for the path of the ranks. Nothing here is aiohttp's code.
"""
