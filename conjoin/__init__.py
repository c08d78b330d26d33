"""Conjoin: from a plain PyTorch model to the fastest way to train it on a given machine."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conjoin.api import (
        CapturedModule,
        CaptureError,
        CheckpointError,
        ConjoinError,
        DeclarationError,
        Explanation,
        Graph,
        GraphError,
        Inspection,
        Loader,
        Machine,
        ParallelModule,
        Pipeline,
        PipelinePrediction,
        Plan,
        PlanError,
        Prediction,
        RankError,
        SearchResult,
        StrategyError,
        UsageError,
        Verdict,
        Weights,
        Wish,
        __version__,
        capture,
        compare,
        diff_plans,
        explain,
        explanation_text,
        fingerprint,
        full_state_dict,
        inspect,
        load,
        load_checkpoint,
        load_graph,
        load_optimizer_state_dict,
        load_plan,
        not_understood,
        optimizer_state_dict,
        parse_graph,
        plan,
        prove_rules,
        register_machine,
        register_operator,
        register_strategy,
        save_checkpoint,
        save_graph,
        save_weights,
        search_plan,
        simulate_plan,
        strategy_names,
        to_module,
        verify,
        verify_plan,
    )

__all__ = [
    "CaptureError", "CapturedModule", "CheckpointError", "ConjoinError", "DeclarationError", "Explanation", "Graph",
    "GraphError", "Inspection", "Loader", "Machine", "ParallelModule", "Pipeline", "PipelinePrediction", "Plan",
    "PlanError", "Prediction", "RankError", "SearchResult", "StrategyError", "UsageError", "Verdict", "Weights", "Wish",
    "__version__", "capture", "compare", "diff_plans", "explain", "explanation_text", "fingerprint", "full_state_dict",
    "inspect", "load", "load_checkpoint", "load_graph", "load_optimizer_state_dict", "load_plan", "not_understood",
    "optimizer_state_dict", "parse_graph", "plan", "prove_rules", "register_machine", "register_operator",
    "register_strategy", "save_checkpoint", "save_graph", "save_weights", "search_plan", "simulate_plan",
    "strategy_names", "to_module", "verify", "verify_plan",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """What is listed above, from `conjoin.api` when it is first asked for: who needs one room loads that room."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from conjoin import api

    found = globals()[name] = getattr(api, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
