"""`sft_then_grpo.py`, in which every rank also prints to both streams, in all the ways that occur."""

from __future__ import annotations

import logging
import os
import sys
import warnings

import sft_then_grpo
from tqdm import tqdm

RANK = os.environ["RANK"]


def say(text: str) -> None:
    """Print a line with one write, which a pipe does not mix with the other rank's."""
    sys.stdout.write(f"[{RANK}] {text}\n")


def main() -> None:
    say(f"starts with {len(sys.argv)} words, stdout is {sys.stdout.encoding}")
    say(f"is not in a terminal: {not sys.stdout.isatty() and not sys.stderr.isatty()}")
    logging.getLogger("script").warning("[%s] a warning of logging", RANK)
    for _ in tqdm(range(3), desc=f"[{RANK}] bar"):
        pass
    warnings.warn(f"[{RANK}] a warning of Python", stacklevel=1)
    say("ünïcode,\ttabs and   spaces   ")
    os.system(f"echo '[{RANK}] a child process'; echo '[{RANK}] its errors' >&2")
    os.write(1, f"[{RANK}] not ".encode() + b"\xff\xfe UTF-8\n")
    say("long " * 600)
    sft_then_grpo.main()
    sys.stderr.write(f"[{RANK}] ends\n")
    if RANK == "0":
        print("[0] ends without a newline", end="")


if __name__ == "__main__":
    main()
