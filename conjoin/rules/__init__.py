"""Substitutions: equations between small graphs, generated, proven, kept in a library, matched and applied."""

from conjoin.rules.definitions.proving import Verdict, prove
from conjoin.rules.deriving import Derivation, Deriver, Step
from conjoin.rules.generator.generating import Selection, generate
from conjoin.rules.generator.selecting import Proven, drop_derived, drop_instances, prove_all
from conjoin.rules.generator.vocabulary import (
    MODELS,
    MULTILINEAR,
    PARALLEL,
    PARALLEL_IMAGES,
    PARALLEL_TABLES,
    TASO,
    VOCABULARIES,
    Vocabulary,
)
from conjoin.rules.graphs.indexing import Index
from conjoin.rules.graphs.matching import Match, find_matches
from conjoin.rules.graphs.near_misses import NearMiss, why
from conjoin.rules.graphs.rewriting import Refused, apply, apply_all, kept_values
from conjoin.rules.judging import Judgement, Standing, judge
from conjoin.rules.laws.law_checks import LARGEST, check_law, find_contradiction, find_counterexample, find_redundant
from conjoin.rules.laws.law_proofs import LawVerdict, prove_by_laws, proven_lemmas
from conjoin.rules.laws.laws import SOURCES, Law, laws, lemmas
from conjoin.rules.library import SHIPPED, Entry, Library, make_entry, method_of, operators_version
from conjoin.rules.making import Made, make_library, reasons_of
from conjoin.rules.operators import OPS, RuleOp
from conjoin.rules.parameters import with_groups
from conjoin.rules.patterns import Apply, Expr, Input, Parameter, Rule, inputs_of, operators_in
from conjoin.rules.text import RuleFile, WrittenRule, load_rules, parse_expressions, parse_rule, parse_rules, save_rules
from conjoin.rules.trials.refuting import Counterexample, Trials, refute, try_out

__all__ = [
    "LARGEST", "MODELS", "MULTILINEAR", "OPS", "PARALLEL", "PARALLEL_IMAGES", "PARALLEL_TABLES", "SHIPPED", "SOURCES",
    "TASO", "VOCABULARIES", "Apply", "Counterexample", "Derivation", "Deriver", "Entry", "Expr", "Index", "Input",
    "Judgement", "Law", "LawVerdict", "Library", "Made", "Match", "NearMiss", "Parameter", "Proven", "Refused", "Rule",
    "RuleFile", "RuleOp", "Selection", "Standing", "Step", "Trials", "Verdict", "Vocabulary", "WrittenRule", "apply",
    "apply_all", "check_law", "drop_derived", "drop_instances", "find_contradiction", "find_counterexample",
    "find_matches", "find_redundant", "generate", "inputs_of", "judge", "kept_values", "laws", "lemmas", "load_rules",
    "make_entry", "make_library", "method_of", "operators_in", "operators_version", "parse_expressions", "parse_rule",
    "parse_rules", "prove", "prove_all", "prove_by_laws", "proven_lemmas", "reasons_of", "refute", "save_rules",
    "try_out", "why", "with_groups",
]  # fmt: skip
