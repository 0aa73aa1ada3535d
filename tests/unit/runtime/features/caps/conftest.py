"""Fixtures: a session."""

from support.rank_session import make_board, make_session, make_slot  # noqa: F401 - fixtures
