"""Which exceptions report exhausted memory, and which only mention it."""

from __future__ import annotations

import pytest

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.memory.error_patterns import ErrorSource, recognize

RUNTIME = ("builtins.RuntimeError", "builtins.Exception")
TORCH = ("torch.OutOfMemoryError", *RUNTIME)
ACCELERATOR = ("torch.AcceleratorError", *RUNTIME)
DIST = ("torch.distributed.DistBackendError", "torch.distributed.DistError", *RUNTIME)
VALUE = ("builtins.ValueError", "builtins.Exception")
OS = ("builtins.OSError", "builtins.Exception")
MEMORY = ("builtins.MemoryError", "builtins.Exception")

ALLOCATOR = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.21"
    " GiB is free."
)
NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:77, unhandled cuda error (run with"
    " NCCL_DEBUG=INFO for details), NCCL version 2.21.5\nncclUnhandledCudaError: Call to CUDA function"
    " failed.\nLast error:\n"
)
WORKER = (
    "Caught RuntimeError in pin memory thread for device 0.\nOriginal Traceback (most recent call last):\n "
    ' File "torch/utils/data/_utils/pin_memory.py", line 37, in do_one_step\n    data = pin_memory(data,'
    " device)\n"
)


REPORTS = {
    (Cause.gpu_oom, ErrorSource.allocator): [
        (TORCH, ALLOCATOR),
        (TORCH, "anything"),
        (("torch.cuda.OutOfMemoryError", *RUNTIME), ALLOCATOR),
        (("torch._C._OutOfMemoryError", *RUNTIME), ALLOCATOR),
        (("cupy.cuda.memory.OutOfMemoryError", *MEMORY), "Out of memory allocating 8,000 bytes"),
        (("ray.exceptions.RayTaskError(OutOfMemoryError)", *TORCH), "ray::f()"),
        (RUNTIME, ALLOCATOR),
        (RUNTIME, "HIP out of memory. Tried to allocate 20.00 MiB"),
        (RUNTIME, "XPU out of memory. Tried to allocate 20.00 MiB"),
        (RUNTIME, 'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":838'),
        (RUNTIME, "No executable batch size found, reached zero."),
    ],
    (Cause.gpu_oom, ErrorSource.driver): [
        (ACCELERATOR, "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        (RUNTIME, "CUDA driver error: out of memory"),
        (RUNTIME, "CUDA error (flash_fwd_launch_template.h:188): out of memory"),
        (RUNTIME, "cuda runtime error (2) : out of memory at THCStorage.cu:58"),
        (RUNTIME, "HIP error: out of memory"),
        (RUNTIME, "Triton Error [CUDA]: out of memory"),
        (RUNTIME, f"{WORKER}RuntimeError: CUDA error: out of memory\n"),
    ],
    (Cause.gpu_oom, ErrorSource.library): [
        (RUNTIME, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        (RUNTIME, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        (RUNTIME, "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        (RUNTIME, "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `x`"),
        (RUNTIME, "cuFFT error: CUFFT_ALLOC_FAILED"),
    ],
    (Cause.gpu_oom, ErrorSource.nccl): [
        (DIST, f"{NCCL}Cuda failure 2 'out of memory'"),
        (DIST, f"{NCCL}Cuda failure 'out of memory'"),
        (DIST, f"{NCCL}Failed to CUDA calloc async 608 bytes"),
    ],
    (Cause.gpu_oom, ErrorSource.vllm_cache): [
        (
            VALUE,
            (
                "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when"
                " initializing the engine."
            ),
        )
    ],
    (Cause.gpu_oom, ErrorSource.vllm): [
        (
            VALUE,
            (
                "Free memory on device cuda:0 (20.1/79.15 GiB) on startup is less than desired GPU memory"
                " utilization (0.9, 71.24 GiB). Decrease GPU memory utilization"
            ),
        )
    ],
    (Cause.host_oom, ErrorSource.host): [
        (MEMORY, ""),
        (MEMORY, "std::bad_alloc"),
        (("numpy._core._exceptions._ArrayMemoryError", *MEMORY), "Unable to allocate 7.45 GiB for an array"),
        (RUNTIME, "std::bad_alloc"),
        (OS, "[Errno 12] Cannot allocate memory"),
        (
            RUNTIME,
            (
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory:"
                " you tried to allocate 99 bytes. Error code 12 (Cannot allocate memory)"
            ),
        ),
        (RUNTIME, "unable to mmap 4096 bytes from file <model.safetensors>: Cannot allocate memory (12)"),
    ],
    (Cause.shm_full, ErrorSource.shared_memory): [
        (OS, "[Errno 28] No space left on device: '/dev/shm/pymp-x'"),
        (RUNTIME, "unable to write to file </torch_3221_89_0>: No space left on device (28)"),
        (
            RUNTIME,
            "unable to allocate shared memory(shm) for file </torch_3221_89_0>: No space left on device (28)",
        ),
        (
            RUNTIME,
            (
                "DataLoader worker (pid 9) is killed by signal: Bus error. It is possible that dataloader's"
                " workers are out of shared memory."
            ),
        ),
        (DIST, f"{NCCL}Error while creating shared memory segment /dev/shm/nccl-Vzg39j (size 9637888)"),
    ],
}
"""Classes and messages by what they report."""


@pytest.mark.parametrize(
    ("cause", "source", "types", "message"),
    [(*report, *raised) for report, spellings in REPORTS.items() for raised in spellings],
)
def test_every_spelling_is_recognized(
    cause: Cause, source: ErrorSource, types: tuple[str, ...], message: str
) -> None:
    """By class, or by the beginning of a library's message."""
    found = recognize(types, message)
    assert found is not None
    assert (found.cause, found.source) == (cause, source)
    assert "\n" not in found.text


@pytest.mark.parametrize(
    ("types", "message"),
    [
        (VALUE, ALLOCATOR),
        (VALUE, "the judge answered: CUDA out of memory"),
        (RUNTIME, "the judge answered: CUDA error: out of memory"),
        (RUNTIME, "reward server: 500, No available memory for the cache blocks"),
        (("builtins.KeyError", "builtins.LookupError"), "CUDA out of memory"),
        (("sandbox.OutOfMemoryError", "builtins.Exception"), "the program used 2 GiB"),
        (("requests.exceptions.HTTPError", *OS), "500 Server Error: CUDA out of memory"),
        (RUNTIME, "DataLoader worker (pid 9) is killed by signal: Killed."),
        (RUNTIME, "CUDA error: an illegal memory access was encountered"),
        (RUNTIME, "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        (
            RUNTIME,
            (
                "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a"
                " non-contiguous input."
            ),
        ),
        (DIST, f"{NCCL}Cuda failure 700 'an illegal memory access was encountered'"),
        (DIST, "NCCL communicator was aborted on rank 3."),
        (OS, "[Errno 28] No space left on device: '/home/user/out/model.safetensors'"),
        (RUNTIME, "unable to write to file </home/user/x>: No space left on device (28)"),
        (RUNTIME, "Connection closed by peer [127.0.0.1]:4182"),
        (VALUE, f"{WORKER}ValueError: CUDA out of memory is not a number\n"),
    ],
)
def test_a_message_that_only_mentions_memory_is_no_report_of_it(types: tuple[str, ...], message: str) -> None:
    """A smaller micro-batch would not help, and another cause would be hidden."""
    assert recognize(types, message) is None


def test_the_line_that_says_so_is_quoted() -> None:
    """NCCL's first line does not."""
    found = recognize(DIST, f"{NCCL}Cuda failure 2 'out of memory'\nmore")
    assert found is not None
    assert found.text == "Cuda failure 2 'out of memory'"
    long = recognize(TORCH, "x" * 1000)
    assert long is not None
    assert len(long.text) == 300
