"""A script is said to use no Trainer and no loop only if nothing that it imports can contain one."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_run.runtime.launch.sources import local_modules, may_use_trainer


@pytest.mark.parametrize(
    ("source", "may"),
    [
        ("", False),
        ("import time, torch.nn as nn\nfrom torch.utils.data import DataLoader", False),
        ("from accelerate import Accelerator\nfrom transformers import AutoModelForCausalLM", False),
        ("from grpo_run.trainers import consensus", False),
        ("from grpo_run.trainers import loop", True),
        ("import grpo_run.trainers.loop as loop", True),
        ("from trl import GRPOConfig", True),
        ("def main():\n    from transformers import Trainer", True),
        ("from transformers.trainer_utils import set_seed", True),
        ("import transformers\ntransformers.Seq2SeqTrainer", True),
        ("from llamafactory.train.tuner import run_exp", True),
        ("import importlib\nimportlib.import_module('x')", True),
        ("__import__('trl')", True),
        ("import beside", False),
        ("import uses_one", True),
    ],
)
def test_what_a_script_imports(source: str, may: bool, tmp_path: Path) -> None:
    """Directly, or through a module beside it."""
    (tmp_path / "beside.py").write_text("import torch")
    (tmp_path / "uses_one.py").write_text("import trl")
    (tmp_path / "train.py").write_text(source)
    assert may_use_trainer(local_modules(tmp_path / "train.py")) is may
