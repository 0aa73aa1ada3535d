"""Imports that the forkserver makes before the first rank is needed. Importing this module does all its work.

First ties the forkserver's life to the supervisor's. Then imports torch, transformers, TRL's trainers and the
modules of ours that a rank uses, without initializing an accelerator, because a forked child could not use an accelerator that its parent has
initialized. Finally excludes the imported objects from garbage collection, which also keeps their memory
pages shared between ranks. Never imported by a rank or by the supervisor.
"""

from __future__ import annotations

import gc
import os

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
import transformers
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

gc.collect()
gc.freeze()
