"""How a vote group's integers reach the other ranks: through the board on one node, by Gloo between several.

May import `trainers.rank.collectives`, and from outside `runtime`; does not import the rest of `trainers.rank`. Start
reading at `transport.py`, which says what a transport is.
"""
