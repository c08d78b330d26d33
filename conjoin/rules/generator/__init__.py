"""Candidates for rules: small graphs enumerated, paired by fingerprint, tested and pruned."""
