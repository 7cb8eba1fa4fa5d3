"""Data sets in the form in which they are published: mathematics, and programs with their tests."""
