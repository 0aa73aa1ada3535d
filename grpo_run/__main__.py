"""`python -m grpo_run`: the command `grpo-run`."""

import sys

from grpo_run.cli.main import main

sys.exit(main())
