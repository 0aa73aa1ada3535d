"""What may be wrong with a machine before a run: `reading.py` reads facts, and `checks.py` judges them."""
