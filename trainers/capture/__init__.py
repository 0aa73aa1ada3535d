"""Capture: redirect what a trainer saves from files into a snapshot buffer in memory.

`interception.py` replaces the save functions of torch and safetensors during a save, `packing.py` lays out
what they would write, `copying.py` copies the tensor bytes. Imports `runtime.staging`, `trainers.upstream`;
imported by `saving`. Start reading at `interception.py`.
"""
