"""Text that several commands print: aligned tables, paragraphs, and sizes.

Imports nothing of this project. Start at `table.py`.
"""
