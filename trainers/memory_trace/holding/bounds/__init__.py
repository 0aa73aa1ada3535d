"""Bounds: whether code of the script bounds what something holds, so that it may stop growing. Reads sources, and executes nothing.

`container_bounds.py` decides for lists, dictionaries and other containers that a variable has, `other_code.py` for code that does not name the
variable, and `tensor_bounds.py` for tensors that are made longer. Imports `sources.py` and `script_files.py` of `holding` only, and where the
script is from `referrers.py`.
"""
