"""Scripts that train with neither a Trainer nor a loop: what is observed of them.

`optimizer_steps.py` notices the first optimizer step, `state_saving.py` what `Accelerator.save_state` saves. Both watch,
and change nothing. May import `rank`, `runtime` and `watchdog`; `hooks/attach.py` installs both.
"""
