"""A plain TRL script of AsyncGRPO with an adapter: the rollouts come from `vllm serve`, which takes each new
policy as an adapter over HTTP.

    async_grpo.py --make-model model        # what `vllm serve model` and the training load
    async_grpo.py --model model --output-dir out

Without `--server` the address is TRL's default. Two additions make it run without a GPU: a name for the
device whose peak TRL looks up, and PyTorch's attention in place of CUDA's.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import tiny
import torch
from datasets import Dataset
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing

TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)
ANSWER = {
    "defaults": {"role": "assistant"},
    "start_anchor": "=",
    "fields": {"content": {"close_pattern": "<eos>|$", "content": "text"}},
}
"""How TRL finds the answer in what the template makes; it knows those of published models only."""
WAITING = 8
"""How many samples wait for the trainer: in a longer queue, all would be too old when their turn comes."""
STALENESS = 2
"""How many policies a sample may lag behind; the server holds two adapters more."""


def attention(
    query: Any, key: Any, value: Any, ends: Any, key_ends: Any, *_: Any, softmax_scale: Any, **__: Any
) -> Any:
    """Compute what flash attention does for segments of one row, each with its own keys, of which the query
    has the last.
    """
    out = torch.empty_like(query)
    groups = query.shape[1] // key.shape[1]
    for start, end, first, last in zip(ends[:-1], ends[1:], key_ends[:-1], key_ends[1:], strict=True):
        keys, values = (
            one[first:last].repeat_interleave(groups, dim=1).transpose(0, 1) for one in (key, value)
        )
        length, width = end - start, last - first
        seen = torch.ones(length, width, dtype=torch.bool, device=query.device).tril(width - length)
        one = query[start:end].transpose(0, 1)
        made = torch.nn.functional.scaled_dot_product_attention(
            one, keys, values, attn_mask=seen, scale=softmax_scale
        )
        out[start:end] = made.transpose(0, 1)
    return out


def train_without_gpu() -> None:
    """Replace the two calls of TRL that need CUDA."""
    torch.cuda.get_device_name = lambda *_: "CPU"
    packing._flash_attn = lambda: types.SimpleNamespace(flash_attn_varlen_func=attention)


def letters(completions: list[Any], **_: Any) -> list[float]:
    """Return a reward that depends on the completion only and differs within a group.

    TRL computes it in the process that it spawns for the rollouts, so it is a function of this module.
    """
    return [len(set(one[0]["content"])) + 0.1 * len(one[0]["content"]) for one in completions]


def make_model(folder: Path, template: str = TEMPLATE) -> None:
    """Write a model and a tokenizer which vLLM loads: its CPU kernels need heads of width 32."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    tokenizer.response_template = ANSWER
    tokenizer.save_pretrained(folder)
    tiny.model(len(tokenizer), seed=11, hidden_size=64, max_position_embeddings=256).save_pretrained(folder)


def main() -> None:
    parser = tiny.rollout_parser(__doc__)
    parser.add_argument("--make-model", action="store_true", help="write the model instead of training")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--server", help="address of vLLM")
    arguments = parser.parse_args()
    if arguments.make_model:
        return make_model(arguments.model)
    if not torch.cuda.is_available():
        train_without_gpu()
    address = {"vllm_server_base_url": arguments.server} if arguments.server else {}
    trainer = AsyncGRPOTrainer(
        model=str(arguments.model),
        args=AsyncGRPOConfig(
            **tiny.settings(arguments),
            num_generations=arguments.num_generations,
            max_completion_length=arguments.max_completion_length,
            max_staleness=STALENESS,
            queue_maxsize=WAITING,
            token_budget=0,  # a step takes as many samples as the batch size says
            **address,
        ),
        reward_funcs=letters,
        train_dataset=Dataset.from_dict(
            {"prompt": [[{"role": "user", "content": one}] for one in tiny.prompts(64)["prompt"]]}
        ),
        callbacks=tiny.callbacks(arguments),
        **tiny.adapter(arguments),
    )
    tiny.train(trainer, arguments)
    tiny.write_digest(trainer, arguments.output_dir)
    return None


if __name__ == "__main__":
    main()
