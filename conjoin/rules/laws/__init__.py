"""Proofs from laws, as in the papers: a table of equations, Z3 over it, and the laws checked by the definitions."""
