"""Write what TRL's own scripts need without a network: tiny models, data sets, and a reward function.

`tests/support/version_sets.py` calls it in each set's environment, because a release of transformers may not
read the files of a later one. Writes into the working directory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import tiny
from transformers import Qwen2ForSequenceClassification

REWARD = '''"""A reward function by import path."""


def variety(completions, **_):
    return [float(len(set(completion))) for completion in completions]
'''


def main() -> None:
    tokenizer = tiny.tokenizer()
    policy = tiny.model(len(tokenizer), 11)
    policy.config.num_labels = 1
    scorer = Qwen2ForSequenceClassification(policy.config)
    teacher = tiny.model(len(tokenizer), 12)
    for name, model in (("model", policy), ("scorer", scorer), ("teacher", teacher)):
        model.save_pretrained(name)
        tokenizer.save_pretrained(name)
    sums = [text.split("=") for text in tiny.texts(96)["text"]]
    rows = {
        "sft": [{"text": f"{left}={right}"} for left, right in sums],
        "dpo": [{"prompt": f"{left}=", "chosen": right, "rejected": right[::-1]} for left, right in sums],
        "kto": [
            {
                "prompt": f"{left}=",
                "completion": right if index % 2 else right[::-1],
                "label": bool(index % 2),
            }
            for index, (left, right) in enumerate(sums)
        ],
        "reward": [
            {"chosen": f"{left}={right}", "rejected": f"{left}={right[::-1]}"} for left, right in sums
        ],
        "grpo": [{"prompt": f"{left}="} for left, _ in sums],
    }
    rows["rloo"] = rows["distillation"] = rows["grpo"]
    for name, lines in rows.items():
        folder = Path("data", name)
        folder.mkdir(parents=True)
        (folder / "train.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    Path("letters.py").write_text(REWARD)


if __name__ == "__main__":
    main()
