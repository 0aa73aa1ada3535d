"""Compile the extension that DeepSpeed loads on CPU, once, before tests run it. Called by the Makefile.

DeepSpeed would compile it in the first test that shards with ZeRO, on every rank's time.
"""

from __future__ import annotations

import os

from support.warm import QUIET


def main() -> None:
    """Compile into the directory that the tests use."""
    os.environ.update(QUIET)
    from deepspeed.accelerator import get_accelerator

    get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)


if __name__ == "__main__":
    main()
