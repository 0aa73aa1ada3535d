"""For reward functions of scripts: `whole_batch` marks one that compares completions with one another.

    from grpo_run.trainers.rewards import whole_batch

    @whole_batch
    def reward(completions, **columns): ...

Under `grpo-run launch`, reward functions can run in worker processes, so that one that hangs or crashes
costs its own samples and not the run. After a failure a function is called again with parts of its batch,
to find the samples that it fails on. Parts would change the rewards of a marked function, so all samples of
its failed call are masked instead. The mark has no effect elsewhere. The reward service is
`runtime/rank/rewards/`. See docs/guide/rewards.md.
"""

from __future__ import annotations

from grpo_run.runtime.rank.rewards.batch import whole_batch

__all__ = ["whole_batch"]
