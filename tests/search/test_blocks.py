"""Which operators are the blocks of a model, and which of them a mode of recomputing runs again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from conjoin.errors import StrategyError
from conjoin.frontends import capture
from conjoin.ir import Graph, cut_in_stages, operators_of
from conjoin.search.blocks import block_segments, segments_for
from tests.search.models import captured


def operators(graph: Graph, recompute: str) -> list[str]:
    """The operators of every segment, in short."""
    nodes = operators_of(graph)
    names = [[node.op.partition(".")[0] for node in nodes[a : b + 1]] for a, b in segments_for(recompute, graph)]
    return [" ".join(found) for found in names]


def test_blocks_are_members_of_a_list_with_parameters_alike() -> None:
    gpt = operators(captured("gpt-125m"), "full")
    assert len(gpt) == 2 and gpt[0] == gpt[1]
    assert gpt[0].startswith("layer_norm linear reshape unbind") and gpt[0].endswith("gelu linear dropout add")
    assert operators(captured("gpt-125m"), "every-2") == gpt[1:]


def test_what_a_block_calls_outside_of_itself_is_part_of_it() -> None:
    found = operators(captured("llama-70b"), "full")
    assert len(found) == 2 and found[0] == found[1] and found[0].count("neg cat") == 2, "the rotary embedding"


def test_experts_inside_of_a_block_are_no_blocks() -> None:
    assert len(operators(captured("moe-8x7b"), "full")) == 2


class Unit(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(width), nn.Linear(width, out)

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(self.layer(self.norm(x)))


def stages() -> nn.Module:
    narrow, wide = (nn.Sequential(*(Unit(width, width) for _ in range(2))) for width in (4, 8))
    return nn.Sequential(narrow, Unit(4, 8), wide)


def test_where_stages_differ_blocks_are_what_they_are_made_of() -> None:
    graph = capture(stages(), (torch.zeros(2, 4), torch.zeros(2, 8)), functional.mse_loss)
    assert operators(graph, "full") == ["layer_norm linear gelu"] * 4
    sources = [graph.source_of(operators_of(graph)[first]) for first, _ in block_segments(graph)]
    assert [source.module for source in sources if source] == ["0.0.norm", "0.1.norm", "2.0.norm", "2.1.norm"]


def test_a_model_of_torch_s_own_modules_has_blocks_by_its_parameters() -> None:
    blocks = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh()) for _ in range(2)]
    graph = capture(nn.Sequential(*blocks), (torch.zeros(2, 4), torch.zeros(2, 4)), functional.mse_loss)
    assert operators(graph, "full") == ["linear tanh linear"] * 2


def kept(graph: Graph) -> list[str]:
    """What is not run again of every segment, in short."""
    nodes = operators_of(graph)
    found = ([nodes[place].op.partition(".")[0] for place in sorted(s.kept)] for s in segments_for("selective", graph))
    return [" ".join(names) for names in found]


def test_attention_in_one_kernel_and_every_other_product_is_kept() -> None:
    gpt = captured("gpt-125m")
    assert operators(gpt, "selective") == operators(gpt, "full")
    assert kept(gpt) == ["linear scaled_dot_product_attention linear"] * 2, "of four products the first and the third"


def test_attention_that_is_spelled_out_is_run_again() -> None:
    bert = captured("bert-base")
    assert operators(bert, "selective") == operators(bert, "full") and set(kept(bert)) == {"linear linear linear"}


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Unit(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.blocks[0], x, use_reentrant=False)
        return self.blocks[2](self.blocks[1](x))


def test_what_the_model_asks_for_is_run_again_unless_a_mode_is_given() -> None:
    graph = capture(Asking(), (torch.zeros(2, 4), torch.zeros(2, 4)), functional.mse_loss)
    assert [len(segments_for(mode, graph)) for mode in ("", "none", "full", "every-2")] == [1, 0, 3, 1]


@pytest.mark.parametrize(("recompute", "stages", "wanted"), [
    ("every-2", 4, [[], ["1"], [], ["3"]]), ("every-3", 2, [[], ["2"]]),
    ("full", 4, [["0"], ["1"], ["2"], ["3"]]),
])  # fmt: skip
def test_every_so_many_blocks_are_those_of_the_whole_model_in_stages_too(
    recompute: str, stages: int, wanted: list[list[str]]
) -> None:
    model = nn.Sequential(*(Unit(4, 4) for _ in range(4)))
    graph = capture(model, (torch.zeros(2, 4), torch.zeros(2, 4)), functional.mse_loss)
    at = [int(source.module[0]) if (source := graph.source_of(node)) and source.module else 3 for node in graph.nodes]
    parts = [stage.graph for stage in cut_in_stages(graph, [block * stages // 4 for block in at])]
    found = []
    for part in parts:
        nodes = operators_of(part)
        segments = segments_for(recompute, part, graph)
        sources = [part.source_of(nodes[first]) for first, _ in segments]
        found.append([source.module[0] for source in sources if source])
    assert found == wanted


def test_more_blocks_than_the_whole_model_has_are_refused() -> None:
    model = nn.Sequential(*(Unit(4, 4) for _ in range(4)))
    graph = capture(model, (torch.zeros(2, 4), torch.zeros(2, 4)), functional.mse_loss)
    with pytest.raises(StrategyError, match="It has 4 blocks"):
        segments_for("every-5", graph, graph)
