"""Text that several commands print: aligned tables, and sizes.

Imports nothing of this project. Start at `table.py`.
"""
