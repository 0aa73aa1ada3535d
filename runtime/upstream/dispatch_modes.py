"""What torch keeps in private modules for modes that see every call of an operator. Importing it imports
torch.

Used by `runtime/planning/`, which traces a training step without data.
"""

from __future__ import annotations

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["FakeTensorMode", "TorchDispatchMode", "tree_leaves"]
