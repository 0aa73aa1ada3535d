"""The live page of `grpo-run serve`: what it shows, who reads the runs for it, and the HTTP server.

`view.py` turns a run's status into plain data and is pure; `feed.py` reads the runs, once for
all readers of the page; `server.py` answers. `samples.py` reads the completions that a run keeps. `static/`
has the page. `grpo-run top` shows the same data in a terminal. Reads run directories; changes no run.
"""
