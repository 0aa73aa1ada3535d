"""What several benchmarks share: the machine, launchers, step logs and intervals; and the larger parts of
single ones.
"""
