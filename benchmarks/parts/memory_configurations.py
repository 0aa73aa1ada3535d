"""Configurations on which predicted memory is compared with real runs. None of them was used to fit anything.

Data of `benchmarks/memory_prediction.py`; `tests/integration/test_memory_prediction.py` has jobs of its own.
"""

from __future__ import annotations

from typing import Any

SHAPES = {
    "tiny, Qwen2, 2 layers of 64": "layers=2,hidden=64,heads=4,kv-heads=2,intermediate=176,vocabulary=1000",
    "GPT-2, 8 layers of 256": "type=gpt2,layers=8,hidden=256,heads=4,vocabulary=8000,positions=1024",
    "Qwen2, 80 M": "layers=8,hidden=512,heads=8,kv-heads=2,intermediate=1408,vocabulary=50257",
    "Qwen2, 630 M": "layers=24,hidden=896,heads=14,kv-heads=2,intermediate=4864,vocabulary=151936",
}
LARGEST = "Qwen2, 630 M"
CORNERS: tuple[dict[str, Any], ...] = (
    {"batch": 2, "prompt": 16, "completion": 48, "checkpointing": False, "autocast": False},
    {"batch": 4, "prompt": 64, "completion": 64, "accumulation": 2},
    {"batch": 2, "prompt": 96, "completion": 160, "weights": "bfloat16", "rescored": True},
    {
        "batch": 2, "prompt": 24, "completion": 40, "padded": False, "autocast": False,
        "optimizer": "adamw_torch",
    },
)  # fmt: skip
SMALLER: tuple[dict[str, Any], ...] = (
    {"optimizer": "adafactor"},
    {"batch": 2, "optimizer": "sgd"},
    {},
    {"weights": "bfloat16"},
)
"""What the largest shape changes of each corner, so that it needs at most 8 GiB."""
DEEP = "layers=7,hidden=128,heads=4,kv-heads=2,intermediate=352,vocabulary=4000"
"""Deep enough to be extrapolated, and small enough for a CPU."""
_SFT = {"algorithm": "sft", "prompt": 0}
OTHER_JOBS: dict[str, dict[str, Any]] = {
    "LoRA": {"model": DEEP, "batch": 4, "prompt": 24, "completion": 72, "lora_rank": 8},
    "LoRA with dropout": {
        "model": DEEP, "batch": 4, "prompt": 24, "completion": 72, "lora_rank": 8, "lora_dropout": 0.1,
        "checkpointing": False,
    },
    "LoRA on two modules, bf16 weights": {
        "model": DEEP, "batch": 4, "prompt": 24, "completion": 72, "lora_rank": 4,
        "lora_targets": ["q_proj", "up_proj"], "weights": "bfloat16", "checkpointing": False,
    },
    "stored attention matrices, bf16 weights": {
        "model": DEEP, "batch": 4, "prompt": 16, "completion": 112, "weights": "bfloat16", "autocast": False,
        "accumulation": 2, "attention": "eager",
    },
    "RLOO": {
        "model": DEEP, "batch": 4, "prompt": 24, "completion": 72, "algorithm": "rloo", "rescored": True,
        "reference": True,
    },
    "RLOO with LoRA": {
        "model": DEEP, "batch": 4, "prompt": 24, "completion": 72, "algorithm": "rloo", "rescored": True,
        "reference": True, "lora_rank": 8, "autocast": False,
    },
    "SFT, equal length, fp32": {
        **_SFT, "model": DEEP, "batch": 2, "completion": 96, "padded": False, "autocast": False,
        "checkpointing": False,
    },
    "SFT, accumulated": {**_SFT, "model": DEEP, "batch": 4, "completion": 160, "accumulation": 2},
    "SFT with LoRA, bf16 weights": {
        **_SFT, "model": DEEP, "batch": 4, "completion": 160, "weights": "bfloat16", "lora_rank": 8,
        "lora_dropout": 0.1, "checkpointing": False,
    },
    "experts, bf16 weights": {
        "model": f"type=mixtral,{DEEP}", "batch": 2, "prompt": 24, "completion": 72, "weights": "bfloat16",
        "checkpointing": False,
    },
    "SFT of experts, fp32": {
        **_SFT, "model": f"type=mixtral,{DEEP}", "batch": 2, "completion": 72, "autocast": False,
    },
}  # fmt: skip
"""Other trainers, adapters, and Mixtral with 8 experts, on a CPU."""
GPU_SHAPES = {
    "GPT-2, 124 M": "type=gpt2,layers=12,hidden=768,heads=12,vocabulary=50257,positions=1024",
    "Llama, 360 M": (
        "type=llama,layers=32,hidden=960,heads=15,kv-heads=5,intermediate=2560,vocabulary=49152,tied=yes"
    ),
    "Qwen2, 0.5 B": "layers=24,hidden=896,heads=14,kv-heads=2,intermediate=4864,vocabulary=151936,tied=yes",
    "Qwen2, 1.5 B": "layers=28,hidden=1536,heads=12,kv-heads=2,intermediate=8960,vocabulary=151936,tied=yes",
}
GPU_CORNERS: tuple[dict[str, Any], ...] = (
    {"batch": 8, "prompt": 128, "completion": 256},
    {"batch": 4, "prompt": 256, "completion": 512, "checkpointing": False, "accumulation": 2},
    {"batch": 8, "prompt": 256, "completion": 512, "weights": "bfloat16", "rescored": True},
    {"batch": 4, "prompt": 128, "completion": 256, "autocast": False, "optimizer": "adamw_torch"},
)


def configurations(device: str) -> list[tuple[str, int, dict[str, Any]]]:
    """Return name of the shape, number of the corner from 1, and job of each configuration for `cpu` or
    `cuda`.
    """
    shapes, corners = (GPU_SHAPES, GPU_CORNERS) if device == "cuda" else (SHAPES, CORNERS)
    return [
        (
            name,
            number,
            {
                "model": model,
                **corner,
                **(SMALLER[number - 1] if device == "cpu" and name == LARGEST else {}),
                "device": device,
            },
        )
        for name, model in shapes.items()
        for number, corner in enumerate(corners, 1)
    ]
