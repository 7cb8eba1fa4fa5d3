"""Checkers of answers: mathematics by math-verify, and programs by their tests in a sandbox."""
