"""Run `grpo.py` with a part of the GPU's memory, and write the highest number of bytes that tensors took.

    limited_gpu.py LIMIT_BYTES PEAK_FILE [arguments of grpo.py]

A limit of 0 is none. torch then raises its own `OutOfMemoryError`, from its own allocator.
"""

from __future__ import annotations

import sys
from pathlib import Path

import grpo
import torch

limit, peak_file = int(sys.argv[1]), Path(sys.argv[2])
del sys.argv[1:3]
if limit:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
grpo.main()
peak_file.write_text(str(torch.cuda.max_memory_allocated()))
