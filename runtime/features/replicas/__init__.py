"""Replicas: what all ranks hold in common is compared, and a rank whose device computes wrongly is named.

Data-parallel ranks hold the same parameters and moments, bit for bit. `rank.py` compares digests of them
(`_digests.py`) every `--compare-every` steps. Ranks that differ end the attempt; `supervisor.py` lets the run
go back to before they did, and ends it if it happens again. With two ranks the exact repetition shows which
one was wrong. What differs at the first comparison is a rank's own, and is not compared.
"""
