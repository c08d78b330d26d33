"""Trainers that people have, on plans: judged by the same trainer with the plain model in one process."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import conjoin
from conjoin.runtime import launch

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")


def example(name: str) -> Any:
    """An example as a module, in ranks too."""
    found = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


def train_with_huggingface(rank: int, folder: str) -> Any:
    return example("huggingface_trainer").train(folder)


def loop_with_accelerate(rank: int) -> list[float]:
    """A loop as accelerate's users write it, on two ranks: a loss and a learning rate for every batch."""
    made = example("huggingface_trainer")
    torch.manual_seed(0)
    model, data = nn.Linear(4, 1).double(), torch.utils.data.TensorDataset(torch.randn(24, 4).double())
    batch = (data.tensors[0][:8],)
    plan = conjoin.plan(model, batch, "local:2", loss=lambda y: y.square().mean(), strategy="data-parallel")
    accelerator = made.WholeBatches(cpu=True, gradient_accumulation_steps=3)
    step = conjoin.load(plan, model)
    optimizer = torch.optim.AdamW(step.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    step, optimizer, loader, schedule = accelerator.prepare(step, optimizer, loader, schedule)
    seen = []
    for _ in range(2):
        for (x,) in loader:
            with accelerator.accumulate(step):
                loss = step(x)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(step.parameters(), 0.1)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                seen += [accelerator.reduce(loss, "sum").item(), optimizer.param_groups[0]["lr"]]
    return seen


def test_hugging_faces_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaForCausalLM

    monkeypatch.chdir(tmp_path)
    made = example("huggingface_trainer")
    torch.manual_seed(0)
    asked = made.TrainingArguments(
        "plain", per_device_train_batch_size=8, per_device_eval_batch_size=8, max_steps=8, learning_rate=1e-2,
        lr_scheduler_type="cosine", warmup_steps=2, max_grad_norm=0.5, logging_steps=1, save_steps=4, report_to=[],
        eval_strategy="steps", eval_steps=4, use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    plain = made.Trainer(
        LlamaForCausalLM(made.make_config()).double(), asked, train_dataset=made.Sentences(),
        eval_dataset=made.Sentences(),
    )  # fmt: skip
    plain.train()
    plain.evaluate()
    expected = [entry["loss"] for entry in plain.state.log_history if "loss" in entry]
    evaluated = [entry["eval_loss"] for entry in plain.state.log_history if "eval_loss" in entry]
    assert len(evaluated) == 3, "the last batch of each is a smaller one"
    two = launch(2, train_with_huggingface, "two")
    assert two[0] == two[1]
    alone = made.train("two", "two/checkpoint-4")  # what two ranks kept, on one
    for losses, ours in (two[0], alone):
        assert losses == pytest.approx(expected, rel=1e-6) and ours == pytest.approx(evaluated, rel=1e-6)
    weights = load_file("plain/checkpoint-8/model.safetensors")
    for found in (load_file("two/checkpoint-8/model.safetensors"),):
        assert all(torch.allclose(found[name], x, rtol=1e-9, atol=1e-12) for name, x in weights.items())
    assert LlamaForCausalLM.from_pretrained("two/checkpoint-8").config.hidden_size == 16


def train_with_lightning(rank: int, folder: str) -> Any:
    made = example("lightning_trainer")
    return made.train(folder, made.on_a_plan)


def as_numbers(logged: list[dict[str, float]]) -> list[float]:
    """The loss and the share of right answers after every batch."""
    return [entry[name] for entry in logged for name in ("loss", "right")]


def test_lightnings_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = example("lightning_trainer")
    plain, evaluated = made.train("plain", lambda *_: "auto")
    two = launch(2, train_with_lightning, "two")
    assert two[0] == two[1]
    alone = made.train("alone", made.on_a_plan, "two/epoch=2.ckpt")  # what two ranks kept, on one
    assert len(plain) == 18 and len(alone[0]) == 9
    for logged, last in (two[0], alone):
        assert as_numbers(logged) == pytest.approx(as_numbers(plain[-len(logged) :]), rel=1e-9)
        assert last == pytest.approx(evaluated, rel=1e-9)
    expected = torch.load("plain/epoch=5.ckpt")["state_dict"]
    found = made.Classifier().double()
    found.load_state_dict(load_file("two/epoch=5.ckpt/model.safetensors"))
    assert all(torch.allclose(found.state_dict()[name], x, rtol=1e-9, atol=1e-12) for name, x in expected.items())


def test_lightning_in_the_precision_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = example("lightning_trainer")
    plain, _ = made.train("plain", lambda *_: "auto", dtype=torch.float32, precision="bf16-mixed", max_steps=4)
    planned = lambda *given: made.on_a_plan(*given, precision="bf16-mixed")
    found, _ = made.train("planned", planned, dtype=torch.float32, max_steps=4)
    full, _ = made.train("full", lambda *_: "auto", dtype=torch.float32, max_steps=4)
    assert as_numbers(found) == pytest.approx(as_numbers(plain), rel=1e-3)
    assert as_numbers(found) != pytest.approx(as_numbers(full), rel=1e-5)
    with pytest.raises(conjoin.UsageError, match="Casts are part of the plan"):
        made.train("twice", planned, dtype=torch.float32, precision="bf16-mixed")


def test_a_lightning_step_that_reads_what_a_plan_would_fix_is_refused() -> None:
    made = example("lightning_trainer")

    class Counting(made.Classifier):  # type: ignore[misc, name-defined]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * (2 if batch_idx % 2 else 1)

    class Epochs(made.Classifier):  # type: ignore[misc, name-defined]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * self.current_epoch

    batch = [torch.randn(8, 8), torch.zeros(8, dtype=torch.int64)]
    for kind, name in ((Counting, "batch_idx"), (Epochs, "the trainer")):
        with pytest.raises(conjoin.ConjoinError, match=f"reads {name}"):
            made.plan_steps(kind(), batch, "local:1", strategy="single")


def test_a_loop_with_accelerate() -> None:
    first, second = launch(2, loop_with_accelerate)
    torch.manual_seed(0)
    model, data = nn.Linear(4, 1).double(), torch.randn(24, 4).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    expected = []
    for epoch in range(2):
        for x in data.split(8):
            loss = model(x).square().mean()
            (loss / 3).backward()
            expected += [loss.item(), optimizer.param_groups[0]["lr"]]
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        expected[-1] = optimizer.param_groups[0]["lr"] = 1e-2 / 2 ** (epoch + 1)
    assert first == second == pytest.approx(expected, rel=1e-12)


def lora_by_peft() -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, use_cache=False, **sizes)).double()
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)).double()


def tune(step: nn.Module, batch: dict[str, torch.Tensor]) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in step.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(4):
        loss = step(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


BATCH = {"input_ids": torch.arange(32).view(4, 8) % 16, "labels": torch.arange(32).view(4, 8) % 16}


def tune_on_ranks(rank: int, plan: conjoin.Plan) -> Any:
    step = conjoin.load(plan, lora_by_peft())
    return tune(step, BATCH), conjoin.full_state_dict(step)


@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
def test_lora_by_peft(strategy: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="it is what is tried")
    plain, tuned = lora_by_peft(), lora_by_peft()
    plan = conjoin.plan(lora_by_peft(), BATCH, "local:2", strategy=strategy)
    (losses, weights), _ = launch(2, tune_on_ranks, plan)
    assert losses == pytest.approx(tune(plain, BATCH), rel=1e-6)  # transformers takes the loss in float32
    adapters = {name: x for name, x in weights.items() if "lora_" in name}
    tuned.load_state_dict(adapters, strict=False)
    tuned.save_pretrained(tmp_path)  # what peft reads again
    own = peft.get_peft_model_state_dict(plain)
    kept = load_file(tmp_path / "adapter_model.safetensors")
    assert own.keys() == kept.keys()
    assert all(torch.allclose(kept[name], x, rtol=1e-4, atol=1e-6) for name, x in own.items())
