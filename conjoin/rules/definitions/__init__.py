"""Proofs from definitions: sums over elements, sizes that follow from each other, and whether two sums are equal."""
