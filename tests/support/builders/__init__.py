"""What several files of unit tests of one module build their cases from."""
