"""Libraries of others that take seconds to import, loaded where ranks of several tests come from; no threads begin."""

import importlib
import importlib.util
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what they use that is to go
    for name in ("transformers.models.llama.modeling_llama", "transformers.trainer", "peft", "lightning"):
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
