"""Imports that the forkserver makes before the first rank is needed. Importing this module does all its work.

First ties the forkserver's life to the supervisor's. Then imports torch, transformers, TRL's trainers and the
modules of ours that a rank uses, without initializing an accelerator, because a forked child could not use an
accelerator that its parent has initialized. What was imported is recorded, so that a rank can tell whether
its script would import the same; so is an import that fails. Finally excludes the imported objects from
garbage collection, which also keeps their memory pages shared between ranks. Never imported by a rank or by
the supervisor.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
from importlib.util import find_spec
from pathlib import Path

from grpo_run.runtime.processes.forkserver import SUPERVISOR_PID, import_path
from grpo_run.runtime.processes.starting import die_with_parent
from grpo_run.runtime.rank import inherited_modules
from grpo_run.runtime.upstream import torch_names

die_with_parent(int(os.environ[SUPERVISOR_PID]))
os.setsid()  # the supervisor alone handles signals to its process group or terminal
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import setproctitle

# setproctitle locates the title's memory through the original environment, which a rank replaces
setproctitle.setproctitle("grpo-run forkserver")

# what a fresh interpreter imports before its script, too
import grpo_run.runtime.rank.bootstrap
import grpo_run.runtime.rank.hooks.attach
import grpo_run.runtime.rank.session  # noqa: F401

ACCELERATOR_DEVICES = (
    "/dev/nvidiactl",
    "/dev/kfd",
    "/dev/dxg",
    "/dev/dri",
    "/dev/accel",
    "/dev/davinci_manager",
)
"""Present where an NVIDIA, AMD, WSL, Intel, Habana or Ascend driver is loaded."""


def import_torch() -> None:
    """Import torch, and numpy with it.

    Torch imports `torch._dynamo` by itself at an optimizer's first step. As a part of the trainers' imports
    it would be hidden until the script imports transformers, and the script would then have parts of two.
    """
    import torch
    import torch.distributed
    import torch.distributed.algorithms.ddp_comm_hooks  # noqa: F401

    torch_names.import_dynamo()


def import_trainers() -> None:
    """Import transformers and TRL with the classes that scripts use, and what of ours acts on them."""
    import transformers.generation.utils
    import transformers.masking_utils
    import transformers.modeling_layers  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Trainer  # noqa: F401 - forces the lazy imports of transformers and TRL
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer  # noqa: F401

    import grpo_run.runtime.rank.gloo_transport
    import grpo_run.runtime.rank.hooks.train_call
    import grpo_run.runtime.rank.loops.steps
    import grpo_run.runtime.rank.saving.snapshots
    import grpo_run.runtime.rank.tensor_digests  # noqa: F401

    # accelerate imports DeepSpeed, if it is installed, at the first generation of every rank, also after a
    # recovery: 425 modules, about 0.45 s. DeepSpeed looks for an accelerator at import, so it is left to the
    # ranks where there is one
    if find_spec("deepspeed") is None or any(Path(device).exists() for device in ACCELERATOR_DEVICES):
        return
    logging.disable(logging.WARNING)  # "Setting accelerator to CPU", on the supervisor's terminal
    try:
        importlib.import_module("deepspeed")
    finally:
        logging.disable(logging.NOTSET)


inherited_modules.import_in_advance((import_torch, import_trainers), import_path())
gc.collect()
gc.freeze()
