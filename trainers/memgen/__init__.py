"""MemGen: latent memory, woven into the generation of a frozen language model.

Start with `model.py`: the frozen reasoner, the weaver that writes memory as latent vectors, and the trigger
that decides at delimiters whether it does. `generation.py` generates with all three, `training.py` has the
trainers of weaver and trigger, and `evaluation.py` measures accuracy and what the trigger does. Recipes in
`trainers/recipes/` use them. See docs/guide/memgen.md.
"""
