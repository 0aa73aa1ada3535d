"""What the forkserver imports before the first rank is needed: the libraries, and then what features have for
a rank.

Importing this module does all its work. After libraries that cannot be imported, features are left to the
ranks, which start over in fresh interpreters.
"""

from __future__ import annotations

import gc
import importlib

import grpo_run.runtime.rank.preload  # noqa: F401 - the libraries, which features need
from grpo_run.runtime.features import modules
from grpo_run.runtime.rank import inherited_modules

imported = inherited_modules.current()
if imported is not None and imported.failure is None:
    for module in modules("rank"):
        for name in module.PART.preloaded:
            importlib.import_module(name)
    gc.freeze()
