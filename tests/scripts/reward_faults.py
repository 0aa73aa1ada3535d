"""A plain TRL GRPO script with two rewards, one of which fails on some samples in a way of the user's choice.

Which samples those are depends on prompt and completion only. Knows nothing of what launches it.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor, as_completed

import tiny

FAULT, ONE_IN = "", 50
LEAKED_BYTES = 2 * 10**9


def fails(prompt: str, completion: str) -> bool:
    """Whether the faulty reward fails on a sample."""
    return zlib.crc32(f"{prompt}|{completion}".encode()) % ONE_IN == 0


def letters(completions: list[str], **columns: object) -> list[float]:
    """The share of letters."""
    return [sum(c.isalpha() for c in text) / max(1, len(text)) for text in completions]


def faulty(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """The share of digits, if it returns."""
    bad = [fails(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
    scores = [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]
    if not any(bad):
        return scores
    if FAULT == "sleep":
        time.sleep(1e6)
    elif FAULT == "regex":
        re.match(r"(a+)+$", "a" * 64 + "b")
    elif FAULT == "ignore_sigterm":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
        time.sleep(1e6)
    elif FAULT == "leak":
        library = ctypes.CDLL(None)
        library.malloc.restype = ctypes.c_void_p
        library.memset(ctypes.c_void_p(library.malloc(LEAKED_BYTES)), 1, LEAKED_BYTES)
    elif FAULT == "raise":
        raise ValueError(f"cannot parse {completions[bad.index(True)]!r}")
    elif FAULT == "nan":
        return [float("nan") if one else score for one, score in zip(bad, scores, strict=True)]
    elif FAULT == "few":
        return [score for one, score in zip(bad, scores, strict=True) if not one]
    elif FAULT == "fork":
        if os.fork() == 0:
            os.setsid()
            time.sleep(1e6)
    elif FAULT == "child":
        subprocess.Popen(["sleep", "1000000"], start_new_session=True)
    elif FAULT == "exit":
        os._exit(3)
    return scores


def verified(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """Judge the samples in threads; the pool waits for judges that never return."""

    def judge(prompt: str, completion: str) -> float:
        if fails(prompt, completion):
            time.sleep(1e6)
        return sum(c.isdigit() for c in completion) / max(1, len(completion))

    with ThreadPoolExecutor(len(prompts)) as pool:
        futures = {
            pool.submit(judge, *pair): at for at, pair in enumerate(zip(prompts, completions, strict=True))
        }
        scores = [0.0] * len(prompts)
        for future in as_completed(futures, timeout=1.0):
            scores[futures[future]] = future.result()
    return scores


def main() -> None:
    global FAULT, ONE_IN
    parser = tiny.rollout_parser(__doc__)
    parser.add_argument("--fault", required=True)
    parser.add_argument("--one-in", type=int, default=50)
    arguments = parser.parse_args()
    FAULT, ONE_IN = arguments.fault, arguments.one_in
    trainer = tiny.rollout_trainer(
        arguments, reward_funcs=[letters, verified if FAULT == "verified" else faulty]
    )
    tiny.train(trainer, arguments)
    tiny.write_digest(trainer, arguments.output_dir)
    print("the script has run its last line", file=sys.stderr)


if __name__ == "__main__":
    main()
