"""Rules on captured graphs: matching, why something does not match, rewriting."""
