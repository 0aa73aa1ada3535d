"""The `grpo-run` command: one file per subcommand, which parses arguments, connects the components and prints.

Start at `main.py`, which selects the subcommand. `launch.py` opens the directory of a run, whose parts are
connected in `launching/`; its options are in `launch_options/`. May import every other package; no other package imports it.
"""
