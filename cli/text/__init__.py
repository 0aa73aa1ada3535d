"""Text that several commands print: aligned tables and paragraphs.

Imports nothing of this project. Start at `table.py`.
"""
