"""Shared parts of the tests: frameworks, rules, an oracle, drawn cases, faults, processes."""
