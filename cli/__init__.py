"""The composition root: one file a command, each parses, wires and prints. Nobody imports it."""
