"""Names of TRL's trainers that generate with vLLM, in a server or in the ranks.

Used by the feature of the rollout server in a rank. All but the last are public in TRL 1.16; the contract
tests say what a release has changed. Contains names only.
"""

from __future__ import annotations

BASE_URL = "vllm_server_base_url"
HOST = "vllm_server_host"
PORT = "vllm_server_port"
GROUP_PORT = "vllm_group_port"
SERVER_TIMEOUT = "vllm_server_timeout"
"""Fields of configurations: where the server is, through which port weights are sent, and how long TRL waits
for the server to be up. AsyncGRPO has the first and the last."""
GENERATION = "vllm_generation"
"""Trainer attribute: what generates, with the methods `SYNC` (no arguments) and `GENERATE` (prompts, images,
...), which all ranks call, and on rank 0 with the attribute `CLIENT`."""
SYNC = "sync_weights"
GENERATE = "generate"
CLIENT = "vllm_client"
"""It has `base_url`, `model` and `session`, and the methods below."""
CLIENT_MODULES = ("trl.generation.vllm_client", "trl.extras.vllm_client")
CLIENT_CLASS = "VLLMClient"
"""The class of the client, in new and old releases. That of AsyncGRPO is another one."""
SEND = "update_named_params"
"""Client method (metadata, iterator of names and tensors): send weights."""
CLIENT_GENERATES = ("generate", "chat")
"""Client methods (..., n, generation_kwargs), which return a dictionary of lists, or of None."""
ROWS = ("prompts", "messages", "features")
"""Their parameters that have one entry for each prompt; `features` may be None."""
JOIN, LEAVE = "init_communicator", "close_communicator"
"""Client methods (device) and (): make the group through which weights are sent, and forget it."""
DIFFERENCE = "sampling/sampling_logp_difference/mean"
"""Metric of GRPO: by how much the log-probabilities of the sampled tokens differ between vLLM and the
trainer; equal on all ranks."""
ASYNC_SYNCS = ("_sync_weight_merged", "_sync_weight_lora")
"""Methods of AsyncGRPO that send weights, on all ranks."""
