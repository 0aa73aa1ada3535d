"""A plain TRL GRPO script in which generation, or a reward, fails whenever one prompt is in the batch.

`--bad-prompt N` names the prompt by its number in the data set; `--where` says what fails, and `--how`
whether it raises or hangs. `--stateful` gives the reward a state, so that it cannot run in another process.
"""

from __future__ import annotations

import time
from typing import Any

import tiny


def main() -> None:
    parser = tiny.rollout_parser(__doc__)
    parser.add_argument("--bad-prompt", type=int, required=True, help="number of the prompt")
    parser.add_argument("--how", choices=("raise", "hang"), default="raise", help="how it fails")
    parser.add_argument("--where", choices=("generation", "reward"), default="generation", help="what fails")
    parser.add_argument("--stateful", action="store_true", help="the reward counts its calls")
    arguments = parser.parse_args()

    rows = tiny.prompts(tiny.prompts_for_one_epoch(arguments))
    text = rows[arguments.bad_prompt]["prompt"]
    bad = tiny.tokenizer()(text)["input_ids"]
    plain, calls = tiny.rewards(arguments.step_seconds), []

    def fail() -> None:
        if arguments.how == "hang":
            time.sleep(1e6)
        raise RuntimeError("the prompt cannot be used")

    def reward(prompts: list[str], **columns: Any) -> list[float]:
        if arguments.stateful:
            calls.append(len(prompts))
        if arguments.where == "reward" and text in prompts:
            fail()
        return list(plain(prompts=prompts, **columns))

    trainer = tiny.rollout_trainer(arguments, reward_funcs=reward, train_dataset=rows)
    generate = trainer.model.generate

    def fragile(input_ids: Any, **keywords: Any) -> Any:
        if arguments.where == "generation" and bad in input_ids.tolist():
            fail()
        return generate(input_ids=input_ids, **keywords)

    trainer.model.generate = fragile
    tiny.train(trainer, arguments)
    tiny.write_digest(trainer, arguments.output_dir)


if __name__ == "__main__":
    main()
