"""A plain TRL script with two trainers in one process: SFT first, then GRPO from the SFT model.

Run it with `torchrun`, `accelerate launch` or `grpo-run launch`. The stages keep their checkpoints in
`<output_dir>/sft` and `<output_dir>/grpo`. Writes `sft/weights.sha256` and, at the end, `weights.sha256`.
Made for DDP.
"""

from __future__ import annotations

import argparse

import tiny
import torch
from sft import trainer_for
from transformers import Qwen2ForCausalLM


def main() -> None:
    parser = tiny.rollout_parser(__doc__)
    parser.add_argument("--sft-steps", type=int, default=8)
    arguments = parser.parse_args()
    tiny.use_test_shims()
    tokenizer = tiny.tokenizer()

    sft = argparse.Namespace(**{**vars(arguments), "max_steps": arguments.sft_steps})
    sft.output_dir = arguments.output_dir / "sft"
    first = trainer_for(sft, sft.output_dir, tokenizer, tiny.model(len(tokenizer), arguments.seed))
    tiny.train(first, sft)
    tiny.write_digest(first, sft.output_dir)
    first.save_model(str(sft.output_dir / "final"))
    first.accelerator.wait_for_everyone()

    grpo = argparse.Namespace(**{**vars(arguments), "output_dir": arguments.output_dir / "grpo"})
    model = Qwen2ForCausalLM.from_pretrained(sft.output_dir / "final", dtype=torch.float32)
    second = tiny.rollout_trainer(grpo, model=model)
    tiny.train(second, grpo)
    tiny.write_digest(second, arguments.output_dir)


if __name__ == "__main__":
    main()
