"""Imports that the forkserver makes before the first rank is needed. Importing this module does all its work.

First ties the forkserver's life to the supervisor's. Then imports torch, transformers, TRL's trainers and the
modules of ours that a rank uses, without initializing an accelerator, because a forked child could not use an
accelerator that its parent has initialized. Finally excludes the imported objects from garbage collection, which also keeps their memory
pages shared between ranks. Never imported by a rank or by the supervisor.
"""

from __future__ import annotations

import gc
import logging
import os
from importlib.util import find_spec
from pathlib import Path

from grpo_run.runtime.processes.forkserver import SUPERVISOR_PID
from grpo_run.runtime.processes.parent_death import die_with_parent

die_with_parent(int(os.environ[SUPERVISOR_PID]))
os.setsid()  # the supervisor alone handles signals to its process group or terminal
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import setproctitle

# setproctitle locates the title's memory through the original environment, which a rank replaces
setproctitle.setproctitle("grpo-run forkserver")

import torch
import torch.distributed
import torch.distributed.algorithms.ddp_comm_hooks
import transformers
import transformers.generation.utils
import transformers.masking_utils
import transformers.modeling_layers
import trl
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Trainer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer

import grpo_run.trainers.bootstrap
import grpo_run.trainers.hooks.attach
import grpo_run.trainers.hooks.train_call
import grpo_run.trainers.rank.session
import grpo_run.trainers.rank.vote_group
import grpo_run.trainers.saving.snapshots  # noqa: F401

PRELOADED = (
    torch, transformers, trl, Trainer, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast,
    GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer,
)  # fmt: skip
"""References that force the lazy imports of transformers and TRL."""

ACCELERATOR_DEVICES = (
    "/dev/nvidiactl",
    "/dev/kfd",
    "/dev/dxg",
    "/dev/dri",
    "/dev/accel",
    "/dev/davinci_manager",
)
"""Present where an NVIDIA, AMD, WSL, Intel, Habana or Ascend driver is loaded."""

# accelerate imports DeepSpeed, if it is installed, at the first generation of every rank, also after a recovery:
# 425 modules, about 0.45 s. DeepSpeed looks for an accelerator at import, so it is left to the ranks where there
# is one
if find_spec("deepspeed") is not None and not any(Path(device).exists() for device in ACCELERATOR_DEVICES):
    logging.disable(logging.WARNING)  # "Setting accelerator to CPU", on the supervisor's terminal
    import deepspeed  # noqa: F401

    logging.disable(logging.NOTSET)

gc.collect()
gc.freeze()
