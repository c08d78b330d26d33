"""The one place here that touches torch's private parts."""

from __future__ import annotations

from torch.distributed import distributed_c10d

from conjoin.runtime.agreement import KeyStore


def default_store(prefix: str) -> KeyStore:
    """The store through which the ranks of the default process group found each other, under a prefix of our own."""
    store: KeyStore = distributed_c10d.PrefixStore(prefix, distributed_c10d._get_default_store())
    return store
