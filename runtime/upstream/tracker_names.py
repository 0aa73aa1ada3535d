"""How runs that are no training of the user's, rehearsals and replays, reach no tracker and no hub.

Called by `grpo-run rehearse` and `grpo-run replay`, and by their parts in a rank. The feature `trackers`, by
which attempts continue one run of a tracker, has nothing to do with it.
"""

from __future__ import annotations

from typing import Any

SWITCHED_OFF = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "TRACKIO_DISABLED": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""Variables that switch off what a script opens by itself."""
CALLBACKS = "transformers.integrations"
"""Package of the callbacks of a Trainer that write to trackers."""


def leave_out_trackers(trainer: Any) -> None:
    """Remove the callbacks of trackers from a `transformers.Trainer`, and its uploads."""
    trainer.args.push_to_hub = False
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback).__module__.startswith(CALLBACKS):
            trainer.remove_callback(callback)
