"""Substitutions: equations between small graphs, generated, proven, kept in a library, matched and applied."""

from conjoin.rules.definitions.proof import Verdict, prove
from conjoin.rules.derivation import Derivation, Deriver, Step
from conjoin.rules.generator.edge_candidates import edge_candidates
from conjoin.rules.generator.generation import Selection, generate
from conjoin.rules.generator.selection import Proven, drop_derived, drop_instances, prove_all
from conjoin.rules.generator.vocabulary import (
    MODELS,
    MULTILINEAR,
    TASO,
    VOCABULARIES,
    Vocabulary,
)
from conjoin.rules.graphs.matching import Match, find_matches
from conjoin.rules.graphs.near_misses import NearMiss, why
from conjoin.rules.graphs.rehearsal import at_small_sizes, find_fault, rehearse
from conjoin.rules.graphs.rewriting import Refused, apply, apply_all, kept_values, replacement_of
from conjoin.rules.graphs.term_index import Index
from conjoin.rules.library import (
    SHIPPED,
    Entry,
    Library,
    make_entry,
    method_of,
    of_each_function,
    operators_version,
)
from conjoin.rules.library_build import Made, certify, make_library, reasons_of
from conjoin.rules.operators import OPS, RuleOp
from conjoin.rules.own import OwnRules, prove_rules
from conjoin.rules.parameters import with_groups
from conjoin.rules.patterns import Apply, Expr, Input, Parameter, Rule, inputs_of, operators_in
from conjoin.rules.text import RuleFile, WrittenRule, load_rules, parse_expressions, parse_rule, parse_rules, save_rules
from conjoin.rules.trials.refutation import Counterexample, Trials, refute, try_out
from conjoin.rules.verdict import Judgement, Standing, judge

__all__ = [
    "MODELS", "MULTILINEAR", "OPS", "SHIPPED", "TASO", "VOCABULARIES", "Apply", "Counterexample",
    "Derivation", "Deriver", "Entry", "Expr", "Index", "Input", "Judgement", "Library", "Made", "Match", "NearMiss",
    "OwnRules", "Parameter", "Proven", "Refused", "Rule", "RuleFile", "RuleOp", "Selection", "Standing", "Step",
    "Trials", "Verdict", "Vocabulary", "WrittenRule", "apply", "apply_all", "at_small_sizes", "certify",
    "drop_derived", "drop_instances", "edge_candidates", "find_fault", "find_matches", "generate", "inputs_of", "judge",
    "kept_values", "load_rules", "make_entry", "make_library", "method_of", "of_each_function", "operators_in",
    "operators_version", "parse_expressions", "parse_rule", "parse_rules", "prove", "prove_all", "prove_rules",
    "reasons_of", "refute", "rehearse", "replacement_of", "save_rules", "try_out", "why", "with_groups",
]  # fmt: skip
