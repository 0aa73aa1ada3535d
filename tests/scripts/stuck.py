"""A plain TRL GRPO script in which some ranks hang once, in a chosen way at a chosen place."""

from __future__ import annotations

import atexit
import concurrent.futures
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import tiny
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

KINDS = ("lock", "queue", "join", "future", "sleep", "child", "stopped-child")
PLACES = (
    "startup", "map", "map-process", "first-step", "reward", "thread", "data", "generate", "callback", "save",
    "evaluation", "between", "exit",
)  # fmt: skip
AT_STEP = 6


def hang(kind: str) -> None:
    """Wait for ever."""
    if kind == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()  # HANG: lock
    elif kind == "queue":
        queue.Queue[int]().get()  # HANG: queue
    elif kind == "join":
        thread = threading.Thread(target=hang, args=("lock",), daemon=True)
        thread.start()
        thread.join()  # HANG: join
    elif kind == "future":
        concurrent.futures.Future[int]().result()  # HANG: future
    elif kind == "sleep":
        time.sleep(100_000)  # HANG: sleep
    elif kind == "child":
        code = "import os\nwhile True: os.write(1, bytes(65536))"
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE).wait()  # HANG: child
    else:
        subprocess.run(["sh", "-c", "kill -STOP $$"], check=True)  # HANG: stopped-child


def main() -> None:
    parser = tiny.argument_parser(__doc__)
    tiny.rollout_arguments(parser)
    parser.add_argument("--place", choices=PLACES, required=True)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], help="the ranks that hang")
    parser.add_argument("--workers", type=int, default=0, help="processes of the data loader")
    arguments = parser.parse_args()
    tiny.check_rollout_boundaries(arguments)
    tiny.use_test_shims()
    rank = int(os.environ["RANK"])
    once = Path(f"once-{rank}")
    step = 0

    def hang_at(place: str) -> None:
        if place == arguments.place and rank in arguments.ranks and not once.exists():
            once.touch()
            hang(arguments.kind)

    def visit(row: dict[str, Any], place: str) -> dict[str, Any]:
        hang_at(place)
        return row

    class Hangs(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            nonlocal step
            step = state.global_step + 1

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == AT_STEP:
                hang_at("callback")

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == AT_STEP:
                hang_at("save")

        def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            hang_at("evaluation")

    reward = tiny.rewards(arguments.step_seconds)

    def rewards(**values: Any) -> Any:
        if step == 1:
            hang_at("first-step")
        if step == AT_STEP:
            hang_at("reward")
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                pool.submit(hang_at, "thread").result()
        return reward(**values)

    def transform(batch: dict[str, Any]) -> dict[str, Any]:
        if step == AT_STEP - 1:
            hang_at("data")
        return batch

    hang_at("startup")
    prompts: Dataset = tiny.prompts(tiny.prompts_for_one_epoch(arguments))
    if arguments.place == "map":
        prompts = prompts.map(visit, fn_kwargs={"place": "map"}, load_from_cache_file=False)
    if arguments.place == "map-process":
        prompts = prompts.map(
            visit, fn_kwargs={"place": "map-process"}, num_proc=2, load_from_cache_file=False
        )
    if arguments.place == "data":
        prompts.set_transform(transform)
    config = GRPOConfig(
        **{
            **tiny.settings(arguments),
            **tiny.rollout_settings(arguments),
            "dataloader_num_workers": arguments.workers,
        }
    )
    tokenizer = tiny.tokenizer()
    trainer = GRPOTrainer(
        model=tiny.policy(len(tokenizer), arguments),
        reward_funcs=rewards,
        args=config,
        train_dataset=prompts,
        eval_dataset=tiny.evaluation(arguments),
        processing_class=tokenizer,
        callbacks=[*tiny.callbacks(arguments), Hangs()],
    )
    generate = trainer.model.generate

    def generate_or_hang(*values: Any, **options: Any) -> Any:
        if step == AT_STEP:
            hang_at("generate")
        return generate(*values, **options)

    trainer.model.generate = generate_or_hang
    atexit.register(hang_at, "exit")
    tiny.train(trainer, arguments)
    hang_at("between")
    tiny.write_digest(trainer, arguments.output_dir)


if __name__ == "__main__":
    main()
