"""Learning guards in a rank: observe each step, judge it, agree by vote, and end the attempt or warn.

What is an alarm is decided in `grpo_run.watchdog.learning`; what follows the end of an attempt, in
`grpo_run.runtime.supervision`. Imports `rank` and `upstream`. Start reading at `guards.py`.
"""
