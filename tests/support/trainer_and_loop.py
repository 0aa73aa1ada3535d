"""The script of most tests, a plain Trainer, and a hand-written loop with the same arguments."""

TRAINER, LOOP = "grpo.py", "grpo_loop.py"
