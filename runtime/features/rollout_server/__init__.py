"""The rollout server: an inference server that a run starts beside its ranks, or that its script names
(`--rollout-server`).

    supervisor.py   starts the server, waits until it answers, judges it after a fault, and answers
    _process.py     its process group: command line, environment, log, end
    _watch.py       a thread that asks the server how it is; reads HTTP and /proc
    _judge.py       what the observations prove: dead, stuck, or neither. Pure
    rank.py         redirects TRL's client to the server, and marks what it does on the board
    _adapters.py    the same for AsyncGRPO, whose policies are adapters
    _custody.py     which policy made each rollout: versions, fingerprints, rollouts that are made again
"""
