"""Lightning's `Trainer` on a plan: `torchrun --nproc-per-node 2 examples/lightning_trainer.py`.

The trainer loops, schedules, logs, evaluates and keeps its checkpoints; the plan decides what every rank computes. The
`LightningModule` stays as it is: its `training_step` is what is planned. Needs `pip install lightning`.
"""

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L  # as its users call it
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import conjoin
from conjoin.runtime import Session

_SHARED = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")


class _NotInSteps:
    """Stands for what another step would find changed: the number of a batch, the trainer. Any use of it is refused."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *_: Any) -> Any:
        raise conjoin.UsageError(
            f"A step of a LightningModule reads {self._name}. The step is captured once and runs for every batch, so "
            f"what it read would never change. Read it in a hook as on_train_batch_start, and give the step a tensor."
        )

    __bool__ = __int__ = __index__ = __float__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __mul__ = __mod__ = __floordiv__ = __truediv__ = _refuse
    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._refuse()


class _Steps(nn.Module):
    """A `LightningModule` as the model of a plan: a batch and a hook in; what the hook returns and logs out."""

    def __init__(self, module: L.LightningModule) -> None:
        super().__init__()
        vars(self).update({name: vars(module)[name] for name in _SHARED}, module=module)  # parameters by its names
        self.train()

    def forward(self, batch: Any, hook: str) -> dict[str, Any]:
        vars(self.module)["training"] = self.training
        step = getattr(self.module, hook)
        taken = list(inspect.signature(step).parameters)[1:]
        with _logged(self.module) as said:
            returned = step(batch, *(_NotInSteps(name) for name in taken))
        return {"loss" if isinstance(returned, Tensor) and self.training else "result": returned, "said": said}


@contextmanager
def _logged(module: L.LightningModule) -> Iterator[list[Any]]:
    """What `log` is called with, for as long as there is no trainer to hear it."""
    said: list[Any] = []

    def log(name: str, value: Any, **options: Any) -> None:
        said.append([name, value.detach() if isinstance(value, Tensor) else value, options])

    trainer = module._trainer
    module.trainer, vars(module)["log"] = _NotInSteps("the trainer"), log
    try:
        yield said
    finally:
        module.trainer = trainer
        del vars(module)["log"]


def plan_steps(module: L.LightningModule, batch: Any, machine: Any, **wishes: Any) -> Any:
    """A plan of `training_step`, as `conjoin.plan` makes it of a model."""
    return conjoin.plan(_Steps(module), (batch, "training_step"), machine, **wishes)


class ConjoinStrategy(SingleDeviceStrategy):
    """Every rank is given whole batches and has whole results: to the trainer it is alone, but for files."""

    def __init__(self, plan: Any) -> None:
        here = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
        super().__init__(here)
        self._plan, self._from = plan, Path()
        self._step: Any = None

    def setup_environment(self) -> None:
        super().setup_environment()
        self._session = Session(self.root_device)
        self.global_rank = self._session.rank

    def setup(self, trainer: L.Trainer) -> None:
        module = self.lightning_module
        if type(self.precision_plugin) is not Precision:
            raise conjoin.UsageError(
                f"A trainer with {type(self.precision_plugin).__name__} was to train by a plan. Casts are part of the "
                f"plan. Leave the trainer's precision out, and plan with precision='bf16-mixed' or another."
            )
        if not module.automatic_optimization:
            raise conjoin.UsageError(
                "A module with automatic_optimization = False was to train by a plan. Its training_step steps "
                "optimizers, which no plan does. Return the loss, and let the trainer do it."
            )
        if self._step is None:
            trained, module.trainer = module._trainer, None
            self._step = conjoin.load(self._plan, _Steps(module), session=self._session)
            module.trainer = trained
            _hold_pieces(module, self._step)
        super().setup(trainer)
        if len(self.optimizers) > 1:
            raise conjoin.UsageError(
                f"A module with {len(self.optimizers)} optimizers was to train by a plan. A checkpoint keeps the state "
                f"of one. Put all parameters into groups of one optimizer."
            )

    def model_to_device(self) -> None:
        pass  # it was loaded there

    def _run(self, hook: str, batch: Any, *_: Any) -> Any:
        self._step.train(hook == "training_step")
        made = self._step(batch, hook)
        for name, value, options in made["said"]:
            self.lightning_module.log(name, value, **{**options, "sync_dist": True})  # every rank has the whole
        return made.get("loss", made.get("result"))

    def training_step(self, *given: Any) -> Any:
        return self._run("training_step", *given)

    def validation_step(self, *given: Any) -> Any:
        return self._run("validation_step", *given)

    def test_step(self, *given: Any) -> Any:
        return self._run("test_step", *given)

    def predict_step(self, *given: Any) -> Any:
        return self._run("predict_step", *given)

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def barrier(self, *_: Any, **__: Any) -> None:
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        held = [obj]
        if dist.is_initialized():
            dist.broadcast_object_list(held, src, device=self.root_device)
        return held[0]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        held = [decision]
        if dist.is_initialized():
            held = [False] * dist.get_world_size()
            dist.all_gather_object(held, decision)
        return sum(held) == len(held) if all else any(held)

    restore_checkpoint_after_setup = True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}  # of no rank as a whole: pieces are written

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        folder = Path(filepath)
        folder.mkdir(parents=True, exist_ok=True)
        optimizer = next(iter(self.optimizers), None) if "optimizer_states" in checkpoint else None
        conjoin.save_weights(folder / "model.safetensors", self._step)
        super().save_checkpoint(checkpoint, folder / "lightning.ckpt", storage_options)
        kept = {"step": checkpoint["global_step"]}
        conjoin.save_checkpoint(folder / "conjoin", self._step, optimizer, extra=kept)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self._from = Path(checkpoint_path)
        read: dict[str, Any] = super().load_checkpoint(self._from / "lightning.ckpt", weights_only)
        return read

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._read(checkpoint)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._read(checkpoint, *self.optimizers)

    def _read(self, checkpoint: Mapping[str, Any], *optimizer: Any) -> None:
        kept = conjoin.load_checkpoint(self._from / "conjoin", self._step, *optimizer)
        if kept["step"] != checkpoint["global_step"]:
            raise conjoin.CheckpointError(
                f"The training was to go on from {self._from}. Its weights are of step {kept['step']} and its "
                f"schedule of step {checkpoint['global_step']}: it was stopped while it was written. Take another."
            )


def _hold_pieces(module: L.LightningModule, step: conjoin.ParallelModule) -> None:
    """Give a module this rank's pieces in the place of its parameters and buffers, for `configure_optimizers`."""
    pieces: dict[str, Any] = {**dict(step.named_parameters(remove_duplicate=False)), **dict(step.named_buffers())}
    for path, part in module.named_modules():
        for held in (part._parameters, part._buffers):
            for name in held:
                held[name] = pieces.get(f"{path}.{name}" if path else name)


class Classifier(L.LightningModule):
    """A module as its author wrote it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.net(x)
        return scores

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        scores = self(x)
        loss = nn.functional.cross_entropy(scores, y)
        self.log("loss", loss, on_step=True)
        self.log("right", (scores.argmax(1) == y).double().mean(), on_step=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("judged", nn.functional.cross_entropy(self(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Losses(L.Callback):
    """What was logged after every batch."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.seen.append({name: float(value) for name, value in trainer.logged_metrics.items()})


def train(
    folder: str,
    strategy: Callable[[L.LightningModule, Any], Any],
    resume: str | None = None,
    dtype: torch.dtype = torch.float64,
    **asked: Any,
) -> tuple[list[dict[str, float]], float]:
    """What the trainer logs after every batch, and the loss of validation in the end."""
    torch.manual_seed(0)
    module, x = Classifier().to(dtype), torch.randn(45, 8).to(dtype)
    data = TensorDataset(x, x[:, :4].argmax(1))
    losses = Losses()
    kept = L.pytorch.callbacks.ModelCheckpoint(folder, "{epoch}", every_n_epochs=3, save_top_k=-1)
    trainer = L.Trainer(
        strategy=strategy(module, list(data[:16])), max_epochs=6, gradient_clip_val=0.5, callbacks=[losses, kept],
        accelerator="auto", devices=1, default_root_dir=folder, logger=False, enable_progress_bar=False,
        enable_model_summary=False, **asked,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=16), DataLoader(data, batch_size=32), ckpt_path=resume)
    return losses.seen, float(trainer.logged_metrics["judged"])


def on_a_plan(module: L.LightningModule, batch: Any, **wishes: Any) -> ConjoinStrategy:
    """For as many ranks as there are."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    chosen = "fsdp" if ranks > 1 else "single"
    return ConjoinStrategy(plan_steps(module, batch, f"local:{ranks}", strategy=chosen, **wishes))


if __name__ == "__main__":
    print(train("trained", on_a_plan)[1])
