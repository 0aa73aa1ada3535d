"""The rollout server: an inference server that a run starts beside its ranks, or that its script names
(`--rollout-server`).

    supervisor.py   starts the server, waits until it answers, judges it after a fault, and answers
    _process.py     its process group: command line, environment, log, end
    _watch.py       a thread that asks the server how it is; reads HTTP and /proc
    _judge.py       what the observations prove: dead, stuck, or neither. Pure
    rank.py         redirects TRL's client to the server, and marks what it does on the board
    _limits.py      time limits of the requests to a server
    _custody.py     which policy made each rollout, and rollouts that are made again
    _adapters.py    the same for AsyncGRPO, whose policies are adapters
    _evidence.py    what proves it: versions, fingerprints, differences. Rank 0 asks
    _seeds.py       seeds of requests, so that a server that is started again samples the same
"""
