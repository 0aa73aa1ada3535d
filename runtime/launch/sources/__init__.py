"""Facts from the sources of the script and its local modules, read as syntax; nothing is executed.

Start at `local_modules.py`, which follows imports from the script. `environment_variables.py` finds the variables that a
source reads and sets, `syntax.py` parses. Called by `cli.launch_options` and `inputs.py`. Imports `runtime.errors` at
most.
"""
