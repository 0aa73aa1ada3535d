"""A stand-in for vLLM's server, and for the part of its client that TRL imports, without a GPU.

`server.py` speaks the routes of vLLM 0.31 as TRL does; `packages` holds the package `vllm` for the ranks;
`starting.py` starts a server in a test and looks into it. Nothing here is vLLM's code.
"""
