"""Address of this machine, and its ports."""

import os
import socket


def get_ip() -> str:
    """Return the address at which the server finds the trainer: this machine, unless told as vLLM is."""
    return os.environ.get("VLLM_HOST_IP") or "127.0.0.1"


def get_open_port() -> int:
    """Return a TCP port that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
