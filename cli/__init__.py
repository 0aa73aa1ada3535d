"""The `grpo-run` command: one module per subcommand, which parses arguments, connects and prints.

Start with `main.py`, which selects the subcommand. `launch.py` opens the directory of a run, whose parts
are connected in `launching/`; its options are in `launching/`. `plan.py` uses `planning/`. May import
every other package; no other package imports it. Decides nothing about a run.
"""
