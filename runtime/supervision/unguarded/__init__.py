"""Scripts that train with neither a Trainer nor a loop, as the supervisor handles them.

`watch.py` says what a restart of such a script means and notices what it saves (`own_saves.py`); `stop_means.py` decides how a
stop is made, and `signalled_stop.py` makes it by SIGTERM. Part of `supervision`, below it: may import the other packages of
`runtime` and `watchdog`, and of `supervision` only the lifecycle.
"""
