"""Chains of rewrites from one side of a rule to the other."""
