"""What the forkserver imports before the first rank is needed; importing this module is its whole work.

Ties the server's life to the supervisor's first, then imports torch, transformers and TRL's trainers
without touching an accelerator (a forked child could not use one that its parent had opened). What was
imported is then frozen out of garbage collection, which also keeps its memory pages shared between ranks.
Never imported by a rank or by the supervisor.
"""

from __future__ import annotations

import gc
import os

from grpo_run.runtime.processes.forkserver import SUPERVISOR_PID
from grpo_run.runtime.processes.parent_death import die_with_parent

die_with_parent(int(os.environ[SUPERVISOR_PID]))
os.setsid()  # signals to the supervisor's group or terminal are the supervisor's to answer
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import setproctitle

# finds the title's memory from the original environment, which a rank replaces: so it is done here
setproctitle.setproctitle("grpo-run forkserver")

import torch
import torch.distributed
import transformers
import trl
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Trainer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer

PRELOADED = (
    torch, transformers, trl, Trainer, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast,
    GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer,
)  # fmt: skip
"""Named so that each lazy import really happens."""

gc.collect()
gc.freeze()
