"""A plain TRL script, SFT and then GRPO, whose second start is not like its first one.

`--start` says how: `skips-sft` trains SFT only if its model is not there, `time-stamp` and `random-name` put
a part into the output directories' names that each start makes anew, `clears` removes the output directories
first.
`--kill-at-step` kills rank 0 once, at the end of that step of GRPO; the marker is outside the output
directories. Writes `weights.sha256` beside the output directories. The script does not know what launches it.
"""

from __future__ import annotations

import argparse
import random
import shutil
import time
from pathlib import Path

import tiny
import torch
from sft import trainer_for
from transformers import Qwen2ForCausalLM

STARTS = ("plain", "skips-sft", "time-stamp", "random-name", "clears")
WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron")


def directories(start: str, root: Path) -> tuple[Path, Path]:
    """Return the output directories of both stages in this start."""
    if start == "time-stamp":
        name = time.strftime("%Y-%m-%d_%H-%M-%S")
    elif start == "random-name":
        name = "-".join(random.SystemRandom().sample(WORDS, 3))
    else:
        return root / "sft", root / "grpo"
    return root / f"sft-{name}", root / f"grpo-{name}"


def main() -> None:
    parser = tiny.rollout_parser(__doc__)
    parser.add_argument("--start", choices=STARTS, default="plain")
    parser.add_argument("--sft-steps", type=int, default=3)
    parser.add_argument("--kill-at-step", type=int, default=0)
    arguments = parser.parse_args()
    root = arguments.output_dir
    root.mkdir(exist_ok=True)
    sft_dir, grpo_dir = directories(arguments.start, root)
    if arguments.start == "clears":
        for folder in (sft_dir, grpo_dir):
            shutil.rmtree(folder, ignore_errors=True)
    tokenizer = tiny.tokenizer()
    final = sft_dir / "final"
    if arguments.start != "skips-sft" or not (final / "config.json").exists():
        sft = argparse.Namespace(**{**vars(arguments), "max_steps": arguments.sft_steps})
        sft.output_dir = sft_dir
        first = trainer_for(sft, sft_dir, tokenizer, tiny.model(len(tokenizer), arguments.seed))
        first.train()
        first.save_model(str(final))

    grpo = argparse.Namespace(**{**vars(arguments), "output_dir": grpo_dir})
    kill_once = [tiny.KillOnce(arguments.kill_at_step, root / "killed")]
    second = tiny.rollout_trainer(
        grpo, model=Qwen2ForCausalLM.from_pretrained(final, dtype=torch.float32),
        callbacks=[*(kill_once if arguments.kill_at_step else []), *tiny.callbacks(grpo)],
    )  # fmt: skip
    second.train()
    tiny.write_digest(second, root)


if __name__ == "__main__":
    main()
