"""MemGen's generation loop on ranks whose completions end at different times, with weights that count as
sharded.

Every forward pass makes a collective, as sharded weights would. Rank 0 ends after its first token, and rank 1
goes on and weaves. With `--without-votes`, ranks call the models when they need them, as the loops are often
written. Writes the tokens of both ranks, and what they are without collectives, to `tokens-RANK.json`.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from grpo_run.trainers.memgen.generation import GenerationSettings, generate
from grpo_run.trainers.memgen.model import MemGen
from grpo_run.trainers.memory_settings import MemorySettings
from grpo_run.trainers.recipes.tiny import tiny_model, tiny_tokenizer


def collective(module: Any, args: Any, kwargs: Any) -> None:
    """Gather as a sharded module would."""
    dist.all_reduce(torch.zeros(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--without-votes", action="store_true")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tokenizer = tiny_tokenizer("abcdefghij")
    torch.manual_seed(0)
    sizes = MemorySettings(prompt_latents=2, latents=2, augmentations=2, lora_rank=2)
    memgen = MemGen(tiny_model(seed=0, tokenizer=tokenizer), sizes, range(2, 12, 2))
    ends = range(len(tokenizer)) if rank == 0 else []
    prompts = [tokenizer("abc")["input_ids"]]

    def tokens(*, sharded: bool) -> list[list[int]]:
        settings = GenerationSettings(
            max_tokens=10, end_tokens=list(ends), pad_token=tokenizer.pad_token_id, sharded=sharded,
            repetition_penalty=1.2,
        )  # fmt: skip
        return generate(memgen, prompts, settings, "always").tokens

    alone = tokens(sharded=False)
    for model in (memgen.reasoner, memgen.weaver, memgen.trigger):
        model.register_forward_pre_hook(collective, with_kwargs=True)
    together = tokens(sharded=not arguments.without_votes)
    Path(f"tokens-{rank}.json").write_text(json.dumps({"alone": alone, "together": together}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    assert "RANK" in os.environ, "start it with a launcher"
    main()
