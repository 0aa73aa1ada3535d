"""Measure the peak of each phase of a real GRPO, RLOO or SFT run: on the CPU from the memory events of
torch's own profiler, or by live bytes where a job says `live`; on a GPU from
`torch.cuda.max_memory_allocated`.

Run as a module with a JSON list of jobs as its argument, in its own process; ranks of DeepSpeed are a process
each. TRL's `train()` runs unmodified; its generation, scoring, loss, backward and optimizer calls are only
marked. GRPO's completions come from `rollout_func`, so that lengths are known, unless a job says `generated`:
then the model generates, and every completion is full.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from support import warm
from support.warm import QUIET

STEPS = 3
"""Optimizer steps; the last one is measured, in which the optimizer has state."""
PREFIX = "MEASURED/"
DEEPSPEED: dict[str, Any] = {
    **dict.fromkeys(
        (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "gradient_clipping",
        ),
        "auto",
    ),
    "zero_optimization": {
        "overlap_comm": False,
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
        "stage3_param_persistence_threshold": 0,
    },
}
"""DeepSpeed's configuration, but for its stage."""
Marked = Callable[[str], AbstractContextManager[Any]]
"""Marks what runs inside as a phase."""


def measure(job: dict[str, Any]) -> dict[str, float]:
    """Train and return the peak of each phase of the last step, in bytes.

    Args:
        job: `model` (words of a shape) and the fields of `planning.job.Job` that differ from its defaults,
            but for `device`, which is `cpu` unless it says `cuda`.
    """
    gc.collect()  # what an earlier job leaves must not be freed during this one
    if job.get("live"):
        return _measure_live(job)
    return _measure_on_gpu(job) if job.get("device") == "cuda" else _measure_on_cpu(job)


def _measure_live(job: dict[str, Any]) -> dict[str, float]:
    from support.live_bytes import LiveBytes

    with LiveBytes() as live:
        _train(job, live.phase)
    return {name: float(size) for name, size in live.peaks.items() if name != "start"}


def _measure_on_gpu(job: dict[str, Any]) -> dict[str, float]:
    """Return the peaks of the last call of each phase, from torch's CUDA allocator."""
    import torch

    peaks: dict[str, float] = {}

    @contextlib.contextmanager
    def marked(name: str) -> Iterator[None]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        try:
            yield
        finally:
            torch.cuda.synchronize()
            peaks[name] = float(torch.cuda.max_memory_allocated())

    _train(job, marked)
    return peaks


def _measure_on_cpu(job: dict[str, Any]) -> dict[str, float]:
    from torch.profiler import ProfilerActivity, profile, record_function

    def marked(name: str) -> AbstractContextManager[Any]:
        return record_function(PREFIX + name)

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        _train(job, marked)
    events = profiled.profiler.kineto_results.events()
    phases = sorted(
        (event.start_ns(), event.end_ns(), event.name().removeprefix(PREFIX))
        for event in events
        if event.name().startswith(PREFIX)
    )
    memory = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return _peaks(phases, memory)


def _peaks(phases: list[tuple[int, int, str]], memory: list[tuple[int, int]]) -> dict[str, float]:
    last: dict[str, tuple[int, int]] = {name: (start, end) for start, end, name in phases}
    peaks: dict[str, float] = {}
    total = 0
    for at, change in memory:
        total += change
        for name, (start, end) in last.items():
            if start <= at < end:
                peaks[name] = max(peaks.get(name, 0), total)
    return peaks


def _train(job: dict[str, Any], marked: Marked) -> None:
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer

    from grpo_run.runtime.planning.model_config import load_model_config
    from grpo_run.runtime.upstream.memory_names import forget_accelerator

    forget_accelerator()
    words = {"a": 0, "<unk>": 1, "<eos>": 2, "<pad>": 3}
    splitter = Tokenizer(WordLevel(words, unk_token="<unk>"))
    splitter.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=splitter, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )
    batch, prompt, completion = job["batch"], job["prompt"], job["completion"]
    padded = job.get("padded", True)

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Return completions of known lengths: the first row is full, the second shorter if rows are
        padded.
        """
        lengths = [completion - (completion // 2 if padded and row % 2 else 0) for row in range(len(prompts))]
        return {
            "prompt_ids": [[0] * (prompt - (1 if padded and row % 2 else 0)) for row in range(len(prompts))],
            "completion_ids": [[0] * length for length in lengths],
            "logprobs": [[-1.0] * length for length in lengths],
        }

    with tempfile.TemporaryDirectory() as folder:
        accumulation = job.get("accumulation", 1)
        rloo, sft = job.get("algorithm") == "rloo", job.get("algorithm") == "sft"
        generated = rloo or job.get("generated", False)  # RLOO has no `rollout_func`
        config = load_model_config(job["model"])
        dtype = job.get("weights", "float32")
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation=job.get("attention", "sdpa")
        )
        if job.get("reference"):
            model.save_pretrained(folder)
            model = folder
        given: dict[str, Any] = {}
        if job.get("lora_rank"):
            from peft import LoraConfig

            given["peft_config"] = LoraConfig(
                r=job["lora_rank"],
                lora_dropout=job.get("lora_dropout", 0.0),
                target_modules=list(job.get("lora_targets", ())) or None,
                task_type="CAUSAL_LM",
            )
        rows: dict[str, Any]
        if sft:  # every other row is shorter; labels of its first half are masked, as those of prompts are
            lengths = [completion - (completion // 3 if padded and row % 2 else 0) for row in range(64)]
            rows = {
                "input_ids": [[0] * length for length in lengths],
                "labels": [[-100] * (length // 2) + [0] * (length - length // 2) for length in lengths],
            }
            settings: dict[str, Any] = {"max_length": completion, "train_sampling_strategy": "sequential"}
        elif generated:
            # the end of a completion is one word of thousands, so that never all rows end early; every other
            # prompt is a token shorter
            rows = {"prompt": [" ".join(["a"] * (prompt - number % 2)) for number in range(64)]}
            settings = {"shuffle_dataset": False}
        else:
            rows, settings = {"prompt": ["a"] * 64}, {}
            given["rollout_func"] = rollout
        if not sft:
            settings |= {
                "num_generations": 2 if generated else batch,
                "max_completion_length": completion,
                "beta": 0.05 if job.get("reference") else 0.0,
            }
            if not rloo:
                settings["num_iterations"] = 2 if job.get("rescored") else 1
            given["reward_funcs"] = lambda completions, **kwargs: [
                float(row % 2) for row in range(len(completions))
            ]
        args = (SFTConfig if sft else RLOOConfig if rloo else GRPOConfig)(
            output_dir=folder,
            use_cpu=job.get("device") != "cuda",
            bf16=job.get("autocast", True),
            report_to=[],
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            gradient_checkpointing=job.get("checkpointing", True),
            max_steps=STEPS,
            save_strategy="no",
            disable_tqdm=True,
            optim=job.get("optimizer", "adamw_torch_fused"),
            model_init_kwargs={"dtype": dtype} if job.get("reference") else None,
            **settings,
        )
        trainer = (SFTTrainer if sft else RLOOTrainer if rloo else GRPOTrainer)(
            model=model, args=args, train_dataset=Dataset.from_dict(rows), processing_class=tokenizer, **given
        )
        del model
        _mark_calls(trainer, marked)
        trainer.train()


def _mark_calls(trainer: Any, mark: Marked) -> None:
    import torch

    def marked(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with mark(name):
                return call(*args, **kwargs)

        return wrapper

    score = getattr(trainer, "_get_per_token_logps_and_entropies", None)

    def scored(*args: Any, **kwargs: Any) -> Any:
        assert score is not None
        return score(*args, **kwargs) if torch.is_grad_enabled() else marked("score", score)(*args, **kwargs)

    if score is not None:
        trainer._get_per_token_logps_and_entropies = scored
    generate = getattr(trainer, "_generate_single_turn", None)
    if generate is not None:
        trainer._generate_single_turn = marked("generate", generate)
    trainer.compute_loss = marked("forward", trainer.compute_loss)
    trainer.accelerator.backward = marked("backward", trainer.accelerator.backward)
    if (
        trainer.is_deepspeed_enabled
    ):  # runs the update, and what belongs to it, inside accelerate's `backward`
        from deepspeed.runtime.engine import DeepSpeedEngine

        DeepSpeedEngine.step = marked("optimizer", DeepSpeedEngine.step)
        return
    create = trainer.create_optimizer

    def create_marked(*args: Any, **kwargs: Any) -> Any:
        optimizer = create(*args, **kwargs)
        optimizer.step = marked("optimizer", optimizer.step)
        return optimizer

    trainer.create_optimizer = create_marked


def measure_in_process(jobs: list[dict[str, Any]], *, timeout_seconds: float) -> list[dict[str, float]]:
    """Measure jobs in a process of their own, or in one for each rank.

    Args:
        jobs: see `measure`; all of them have as many ranks as the first.
        timeout_seconds: for all of them.

    Returns:
        The peaks of the first rank.
    """
    ranks = jobs[0].get("ranks", 1)
    # with one thread: on a busy machine, threads of torch spend most of their time waiting for one another
    environment = {**os.environ, **QUIET, "PYTHONPATH": os.pathsep.join(sys.path)}
    if ranks > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        environment |= {"MASTER_PORT": str(port)}
    command = [sys.executable, "-P", __file__, json.dumps(jobs)]
    with contextlib.ExitStack() as started:
        if layout := jobs[0].get("layout"):
            zero = {**DEEPSPEED["zero_optimization"], "stage": int(layout.removeprefix("zero"))}
            file = Path(started.enter_context(tempfile.TemporaryDirectory())) / "deepspeed.json"
            file.write_text(json.dumps({**DEEPSPEED, "zero_optimization": zero}))
            environment |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
        outputs = [started.enter_context(tempfile.TemporaryFile()) for _ in range(ranks)]
        processes = []
        for rank, output in enumerate(outputs):
            number = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            process = warm.start(
                command, cwd=Path.cwd(), environment={**environment, **number}, stdout=output
            )
            started.callback(process.kill)
            processes.append(process)
        code = processes[0].wait(timeout_seconds)
        outputs[0].seek(0)
        printed = outputs[0].read().decode()
        assert code == 0, printed[-3000:]
    found: list[dict[str, float]] = json.loads(printed.strip().splitlines()[-1])
    return found


def job_fields(job: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a measured job that `planning.job.Job` has."""
    return {
        key: value
        for key, value in job.items()
        if key not in ("model", "padded", "device", "generated", "live")
    }


if __name__ == "__main__":
    print(json.dumps([measure(job) for job in json.loads(sys.argv[1])]))
