"""Takes an optimizer step with torch only, and imports transformers and makes a process group afterwards."""

from __future__ import annotations

import torch

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()

from transformers import Trainer

torch.distributed.init_process_group("gloo")
print(Trainer.__name__, torch.distributed.get_world_size(), flush=True)
