"""A plain TRL script of AsyncGRPO over one pass of its prompts, with a server that needs no weights.

Two additions make it run without vLLM and a GPU: stand-ins for the packages `vllm` and `aiohttp`, and those
of `async_grpo.py`. Writes the model that it trains.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).resolve().parents[1] / "support"
for package, folder in (("vllm", "rollout_server"), ("aiohttp", "async_rollouts")):
    if importlib.util.find_spec(package) is None:
        sys.path.append(str(SUPPORT / folder / "packages"))

import async_grpo
import tiny
from datasets import Dataset
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer


class NoTransfer:
    """Sends no weights."""

    def init_weight_transfer(self) -> None:
        """Begin."""

    def pause(self) -> None:
        """Before weights are sent."""

    def send_weights(self, iterator: Any) -> None:
        """Leave them."""

    def resume(self) -> None:
        """After weights are sent."""

    def destroy(self) -> None:
        """End."""


def main() -> None:
    parser = tiny.rollout_parser(__doc__)
    parser.add_argument("--server", required=True)
    parser.add_argument("--stream", action="store_true", help="read the prompts from a stream")
    parser.add_argument(
        "--agent", action="store_true", help="with the tools and environment of `async_agent.py`"
    )
    arguments = parser.parse_args()
    model = arguments.output_dir / "initial"
    agents: dict[str, Any] = {}
    if arguments.agent:
        import agent
        import async_agent

        agents = {"tools": [async_agent.search, async_agent.look_up], "environment_factory": async_agent.Sums}
    if not model.exists():
        async_grpo.make_model(model, agent.TEMPLATE if arguments.agent else async_grpo.TEMPLATE)
    async_grpo.train_without_gpu()
    data = Dataset.from_dict(
        {"prompt": [[{"role": "user", "content": one}] for one in tiny.prompts(arguments.prompts)["prompt"]]}
    )
    trainer = AsyncGRPOTrainer(
        model=str(model),
        args=AsyncGRPOConfig(
            **{
                **tiny.settings(arguments), "num_generations": arguments.num_generations,
                "num_train_epochs": 1, "max_completion_length": 64, "max_staleness": 1000,
                "queue_maxsize": 8, "max_inflight_tasks": 12, "token_budget": 0,
                "vllm_server_base_url": arguments.server, **arguments.settings,
                **({"max_tool_calling_iterations": 1} if arguments.agent else {}),
            }
        ),
        reward_funcs=async_grpo.letters,
        train_dataset=data.to_iterable_dataset() if arguments.stream else data,
        weight_transfer=NoTransfer(),
        **agents,
    )  # fmt: skip
    tiny.train(trainer, arguments)


if __name__ == "__main__":
    main()
