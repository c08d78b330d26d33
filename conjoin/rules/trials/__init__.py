"""Rules on real tensors: what torch computes, random instances, counterexamples."""
