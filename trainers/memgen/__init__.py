"""MemGen: latent memory, woven into the generation of a frozen language model.

Start with `model.py`: the frozen reasoner, the weaver that writes memory as latent vectors, and the trigger
that decides at delimiters whether it does. `generation.py` generates with all three, `training.py` has the
trainers of weaver and trigger, `evaluation.py` measures accuracy and what the trigger does, and `saved.py`
saves and loads. Recipes in `trainers/recipes/` use them. See docs/guide/memgen.md.
"""

from grpo_run.trainers.memgen.saved import SavedMemGen, load

__all__ = ["SavedMemGen", "load"]
