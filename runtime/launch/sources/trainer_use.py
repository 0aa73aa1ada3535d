"""Whether a script may use a Trainer or a grpo-run loop, judged by its imports.

Says no only if every import is known to bring none: a package that is not listed may contain a Trainer. Called by
`cli.launching`; it decides how a stop before the first step ends, when the script has not imported what it uses.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Sequence

from grpo_run.runtime.launch.sources.local_modules import Source, imported_names

WITHOUT_TRAINER = frozenset({
    "accelerate", "bitsandbytes", "datasets", "deepspeed", "einops", "flash_attn", "huggingface_hub", "matplotlib", "mlflow",
    "numpy", "packaging", "pandas", "peft", "PIL", "psutil", "pydantic", "requests", "rich", "safetensors", "scipy", "sklearn",
    "tensorboard", "tiktoken", "tokenizers", "torch", "torchaudio", "torchvision", "tqdm", "typing_extensions", "vllm", "wandb",
    "yaml",
})  # fmt: skip
"""Packages that contain no subclass of `transformers.Trainer`."""
TRANSFORMERS = "transformers"
OWN = frozenset({"grpo_run", "grpo_run.trainers"})
CONSENSUS = "grpo_run.trainers.consensus"


def may_use_trainer(sources: Sequence[Source]) -> bool:
    """Return False only if the script and its local modules import nothing that may contain a Trainer or a loop."""
    local = {
        source.path.parent.name if source.path.stem == "__init__" else source.path.stem for source in sources
    }
    return any(_may_contain(source.nodes, local) for source in sources)


def _may_contain(nodes: Sequence[ast.AST], local: Iterable[str]) -> bool:
    known = WITHOUT_TRAINER | sys.stdlib_module_names | frozenset(local)
    for level, name in imported_names(nodes):
        package, _, rest = name.partition(".")
        if level or package in known:
            continue
        if package == TRANSFORMERS:
            if "train" in rest.lower():
                return True
        elif name not in OWN and not f"{name}.".startswith(f"{CONSENSUS}."):
            return True
    return any(
        (isinstance(node, ast.Attribute) and node.attr.endswith(("Trainer", "import_module")))
        or (isinstance(node, ast.Name) and node.id in ("__import__", "import_module"))
        for node in nodes
    )
