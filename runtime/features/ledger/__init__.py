"""The ledger of prompts: what became of every prompt of the data order, its group and its rollouts.

    rank.py     each rank appends what it has generated to a file of its own, rank 0 also the steps
    _async.py   the same for AsyncGRPO, on rank 0, and where its prompts go on
    _stream.py  what became of AsyncGRPO's prompts, in their order. Pure
    _writer.py  writes a rank's file
    _lines.py   the lines of these files, in the folder `ledger` of the run directory
    _replay.py  what counts of one file: a step that was done again is void. Pure
    _join.py    the files of all ranks and the journal's commits as one line for each prompt. Pure
    report.py   sums and lengths, for `grpo-run report`
    command.py  `grpo-run ledger`, which prints them and exports the lines

A line is written by one `write` and never synced. A kill of processes loses nothing; a crash of the machine
may lose the lines of the last steps, and a step of which the journal has no commit counts as not trained.
"""
