"""Descriptor-driven test cases: one table feeds the support, numerics, key and error tests."""
