"""The `grpo-run` command: one file per subcommand, which parses, connects the parts and prints.

Start at `main.py`, which selects the subcommand. `launch.py` connects the parts of a run; its options are in
`launch_options/`. May import every other package; no other package imports it.
"""
