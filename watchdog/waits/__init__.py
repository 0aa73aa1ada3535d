"""Proof that nothing can wake a rank, from what each thread of it and of its descendants waits for.

Start with `proof.py` (`prove`). `looks.py` holds what was read of the threads, `system_calls.py` decodes a
system call into what its thread waits for, and `sentences.py` names what a rank waits for. Pure: `runtime/supervisor/detection/` reads /proc.
Imports `watchdog/text.py` only.
"""
