"""Address of this machine."""

import os


def get_ip() -> str:
    """Return the address at which the server finds the trainer: this machine, unless told as vLLM is."""
    return os.environ.get("VLLM_HOST_IP") or "127.0.0.1"
