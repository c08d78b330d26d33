"""The image classifiers have their published sizes and train at their tiny sizes."""

from __future__ import annotations

from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from zoo import convnets, inception, nasnet, resnet, vit
from zoo.workload import Entry, Workload, build_entry

FAMILIES = (convnets, resnet, inception, nasnet, vit)
MODELS: dict[str, Entry] = {name: entry for family in FAMILIES for name, entry in family.MODELS.items()}

# (parameters, image shape, classes, batch size).  Parameters: as published for 1000 classes; LeNet-5 counted by hand,
# 156 + 2 416 + 48 120 + 10 164 + 850; NASNet-A is given as 5.3 M, and the released model without its auxiliary head has
# the number below.  Batch sizes are those of the papers that measure the model, 64 where there is none.
PUBLISHED = {
    "lenet": (61_706, (1, 32, 32), 10, 64),
    "alexnet": (61_100_840, (3, 224, 224), 1000, 256),
    "vgg13": (133_047_848, (3, 224, 224), 1000, 8),
    "resnet-50": (25_557_032, (3, 224, 224), 1000, 64),
    "resnet-101": (44_549_160, (3, 224, 224), 1000, 64),
    "resnext-50": (25_028_904, (3, 224, 224), 1000, 64),
    "inception-v3": (27_161_264, (3, 299, 299), 1000, 64),
    "nasnet-a": (5_289_978, (3, 224, 224), 1000, 64),
    "vit-b-16": (86_567_656, (3, 224, 224), 1000, 64),
    "vit-l-16": (304_326_632, (3, 224, 224), 1000, 64),
}
Kind = TypeVar("Kind", bound=nn.Module)
every_model = pytest.mark.parametrize("name", sorted(MODELS))


def build(
    name: str, *, tiny: bool = True, batch_size: int | None = None, device: str = "cpu", seed: int = 0
) -> Workload:
    return build_entry(MODELS[name], tiny=tiny, batch_size=batch_size, device=device, seed=seed)


def images_and_target(workload: Workload) -> tuple[Tensor, Tensor]:
    assert isinstance(workload.batch, tuple)
    images, target = workload.batch
    return images, target


def loss_and_logits(workload: Workload) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss and all the logits: one tensor, or two for a model with an auxiliary classifier in training."""
    assert workload.loss is not None
    images, target = images_and_target(workload)
    output = workload.model(images)
    return workload.loss(output, target), output if isinstance(output, tuple) else (output,)


def in_float64(workload: Workload) -> Workload:
    images, target = images_and_target(workload)
    return workload._replace(model=workload.model.double(), batch=(images.double(), target))


def modules_of(model: nn.Module, kind: type[Kind]) -> list[Kind]:
    return [module for module in model.modules() if isinstance(module, kind)]


def test_every_model_is_listed_here() -> None:
    assert set(MODELS) == set(PUBLISHED)


@every_model
def test_full_size_is_the_published_one(name: str) -> None:
    parameters, image, classes, batch_size = PUBLISHED[name]
    workload = build(name, tiny=False, device="meta")
    images, target = images_and_target(workload)
    assert sum(p.numel() for p in workload.model.parameters()) == parameters
    assert images.shape == (batch_size, *image)
    assert target.shape == (batch_size,)
    assert all(t.is_meta for t in (images, target, *workload.model.parameters(), *workload.model.buffers()))
    loss, outputs = loss_and_logits(workload)
    assert loss.shape == ()
    assert {logits.shape for logits in outputs} == {(batch_size, classes)}


@every_model
def test_tiny_is_small(name: str) -> None:
    workload = build(name)
    assert images_and_target(workload)[0].shape[0] == 4
    assert sum(p.numel() for p in workload.model.parameters()) < 250_000


@every_model
@pytest.mark.parametrize("batch_size", [2, 4])
def test_tiny_trains_in_float64(name: str, batch_size: int) -> None:
    workload = in_float64(build(name, batch_size=batch_size))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        loss, _ = loss_and_logits(workload)
    loss.backward()
    assert loss.dtype == torch.float64
    assert torch.isfinite(loss)
    for parameter_name, parameter in workload.model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
        # Attention does not depend on the bias of the keys: softmax ignores what all scores of a row share.
        if not parameter_name.endswith("key.bias"):
            assert parameter.grad.any(), parameter_name


@every_model
def test_tiny_learns_its_batch(name: str) -> None:
    # Adam and not plain descent: one step size then suits models with and without normalisation.
    workload = build(name)
    for dropout in modules_of(workload.model, nn.Dropout):
        dropout.eval()
    optimizer = torch.optim.Adam(workload.model.parameters(), lr=1e-3)
    losses = []
    for _ in range(8):
        loss, _ = loss_and_logits(workload)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]


@every_model
def test_building_is_reproducible_and_leaves_the_random_state_alone(name: str) -> None:
    before = torch.random.get_rng_state()
    first, again, other = build(name), build(name), build(name, seed=1)
    assert torch.equal(before, torch.random.get_rng_state())
    images = [images_and_target(workload)[0] for workload in (first, again, other)]
    weights = [parameters_to_vector(workload.model.parameters()) for workload in (first, again, other)]
    for one, same, different in (images, weights):
        assert torch.equal(one, same)
        assert not torch.equal(one, different)
    assert torch.equal(images_and_target(first)[1], images_and_target(again)[1])


@pytest.mark.parametrize("tiny", [False, True])
def test_resnext_has_grouped_convolutions_and_both_kinds_of_shortcut(tiny: bool) -> None:
    model = build("resnext-50", tiny=tiny, device="meta").model
    blocks = modules_of(model, resnet.Bottleneck)
    grouped = [conv for conv in modules_of(model, nn.Conv2d) if conv.groups > 1]
    assert len(grouped) == len(blocks)
    assert {conv.groups for conv in grouped} == {8 if tiny else 32}
    assert grouped[0].in_channels // grouped[0].groups == (2 if tiny else 4)
    identities = [block for block in blocks if isinstance(block.shortcut, nn.Identity)]
    assert len(blocks) - len(identities) == 4
    assert identities


def test_inception_has_94_convolutions_and_an_auxiliary_output_only_in_training() -> None:
    model = build("inception-v3", tiny=False, device="meta").model
    assert isinstance(model, inception.InceptionV3)
    assert len(modules_of(model, nn.Conv2d)) - len(modules_of(model.auxiliary, nn.Conv2d)) == 94
    workload = build("inception-v3")
    assert len(loss_and_logits(workload)[1]) == 2
    workload.model.eval()
    assert len(loss_and_logits(workload)[1]) == 1


def test_inception_loss_adds_four_tenths_of_the_auxiliary_loss() -> None:
    main, aux, target = torch.randn(4, 10), torch.randn(4, 10), torch.tensor([1, 2, 3, 4])
    parts = [inception.inception_loss(logits, target) for logits in (main, aux)]
    torch.testing.assert_close(inception.inception_loss((main, aux), target), parts[0] + 0.4 * parts[1])


def test_nasnet_cells_put_out_the_published_channels() -> None:
    model = build("nasnet-a", tiny=False, device="meta").model
    assert isinstance(model, nasnet.NASNet)
    newer = older = model.stem(torch.empty(2, 3, 224, 224, device="meta"))
    shapes = []
    for cell in model.cells:
        newer, older = cell(newer, older), newer
        shapes.append(tuple(newer.shape[1:3]))
    stem, stages = [(44, 56), (88, 28)], [(264, 28)] * 4 + [(352, 14)] + [(528, 14)] * 4 + [(704, 7)] + [(1056, 7)] * 4
    assert shapes == stem + stages


def test_vit_depends_on_every_patch() -> None:
    workload = in_float64(build("vit-b-16"))
    images = images_and_target(workload)[0].requires_grad_()
    workload.model.eval()(images).sum().backward()
    assert images.grad is not None
    assert images.grad.ne(0).all()
