"""Hugging Face's `Trainer` on a plan: `torchrun --nproc-per-node 2 examples/huggingface_trainer.py`.

The trainer loops, schedules, logs, evaluates and keeps its folders; the plan decides what every rank computes. Needs
`pip install accelerate`, as the trainer does.
"""

import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch import nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import conjoin


class WholeBatches(Accelerator):  # type: ignore[misc]
    """Every rank is given the whole batch and has the whole result: nothing is wrapped, dealt out or gathered."""

    num_processes, process_index = 1, 0  # as far as data are concerned

    def prepare_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        return model

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Makes one step for a batch; accelerate's makes one for each process."""
        prepared = super().prepare_scheduler(scheduler)
        prepared.split_batches = True
        return prepared

    def gather(self, tensor: Any) -> Any:
        return tensor

    def reduce(self, tensor: Any, *_: Any, **__: Any) -> Any:
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """What is there; of a smaller last batch as much as it has (a trainer repeats its loss for a full batch)."""
        state = self.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return input_data
        return recursively_apply(lambda x: x[: state.remainder], input_data)


class ConjoinTrainer(Trainer):  # type: ignore[misc]
    """A trainer whose model is what `conjoin.load` gave."""

    def __init__(self, model: conjoin.ParallelModule, config: Any, args: TrainingArguments, **others: Any) -> None:
        args.remove_unused_columns = False  # the names of inputs are not known from the signature
        args.label_names = args.label_names or ["labels"]
        super().__init__(model=model, args=args, **others)
        self.model_accepts_loss_kwargs = False  # the loss is the mean over the batch, as the plan has it
        self._config = config

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = WholeBatches

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        folder = output_dir or self.args.output_dir
        Path(folder).mkdir(parents=True, exist_ok=True)
        conjoin.save_weights(folder, self.model)
        if self.is_world_process_zero():
            self._config.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        kept = {"schedule": self.lr_scheduler.state_dict()}
        conjoin.save_checkpoint(Path(output_dir) / "conjoin", self.model, self.optimizer.optimizer, extra=kept)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        pass  # weights come with the state of the optimizer

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            kept = conjoin.load_checkpoint(Path(checkpoint) / "conjoin", self.model, self.optimizer.optimizer)
            self.lr_scheduler.load_state_dict(kept["schedule"])


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Numbers one after the other."""

    def __len__(self) -> int:
        return 44

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(12) + index) % 16
        return {"input_ids": tokens, "labels": tokens}


def make_config() -> LlamaConfig:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaConfig(vocab_size=16, use_cache=False, **sizes)


def train(folder: str, resume: str | None = None, **arguments: Any) -> tuple[list[float], list[float]]:
    """The losses that the trainer logs, and those of evaluation."""
    config, ranks = make_config(), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).double()
    example = torch.utils.data.default_collate([Sentences()[i] for i in range(8)])
    plan = conjoin.plan(model, example, f"local:{ranks}", strategy="fsdp" if ranks > 1 else "single")
    step = conjoin.load(plan, model)
    asked = TrainingArguments(
        folder, per_device_train_batch_size=8, per_device_eval_batch_size=8, max_steps=8, learning_rate=1e-2,
        lr_scheduler_type="cosine", warmup_steps=2, max_grad_norm=0.5, logging_steps=1, save_steps=4, report_to=[],
        eval_strategy="steps", eval_steps=4, use_cpu=not torch.cuda.is_available(), disable_tqdm=True, **arguments,
    )  # fmt: skip
    trainer = ConjoinTrainer(step, config, asked, train_dataset=Sentences(), eval_dataset=Sentences())
    trainer.train(resume_from_checkpoint=resume)
    trainer.evaluate()
    log = trainer.state.log_history
    return [now["loss"] for now in log if "loss" in now], [now["eval_loss"] for now in log if "eval_loss" in now]


if __name__ == "__main__":
    print(train("trained"))
