"""What torch keeps in private modules for modes that see every call of an operator. Importing it imports
torch.

Used by `runtime/planning/`, which traces a training step without data, and to record where tensors are made.
"""

from __future__ import annotations

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode
from torch.utils._pytree import tree_leaves

__all__ = ["FakeTensorMode", "TorchDispatchMode", "is_in_torch_dispatch_mode", "tree_leaves"]
