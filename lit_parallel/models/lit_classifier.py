"""The LightningModule that trains an image classifier."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lit_parallel.models.lenet import lenet
from lit_parallel.models.resnet18 import resnet18

ModelName = Literal["lenet", "resnet18"]


class LitClassifier(LightningModule):
    """Cross-entropy, SGD with momentum, warm-up and cosine decay, and accuracy over all ranks.

    Logs `train_loss` of each step, `train_loss_epoch`, and for validation and test `val_loss`, `val_acc`, `test_loss`
    and `test_acc`, in which each image counts once however the images are spread over devices.

    Args:
        model: "lenet" or "resnet18".
        lr: Rate for one device's batch.
        lr_scale: How many times larger the batch is than one device's; the rate is multiplied by it
            (linear scaling, Goyal et al. 2017).
        warmup_epochs: Epochs over which the rate climbs to its full height: from `lr` where it is scaled, as Goyal et
            al. do it, else from zero. It then falls to zero along a cosine by the end of training.
        momentum: Of SGD.
        num_classes: Number of labels.
        channels_last: Keep the network's tensors with the channels innermost, which convolutions in bfloat16 like best.
        compile: Compile the network with `torch.compile`.
    """

    def __init__(
        self,
        model: ModelName = "lenet",
        *,
        lr: float = 0.1,
        lr_scale: float = 1,
        warmup_epochs: float = 0,
        momentum: float = 0.9,
        num_classes: int = 10,
        channels_last: bool = False,
        compile: bool = False,
    ) -> None:
        super().__init__()
        if model not in get_args(ModelName):
            raise ValueError(f"Unknown model {model!r}; choose one of {', '.join(get_args(ModelName))}.")
        self.save_hyperparameters()
        self.net: nn.Module = {"lenet": lenet, "resnet18": resnet18}[model](num_classes=num_classes)
        if channels_last:
            # Images of one channel are so either way. Not `net.to`, which leaves kernels of one pixel as they are,
            # though their gradients will have other strides.
            for weight in (each for each in self.net.parameters() if each.dim() == 4):
                weight.data = torch.empty_like(weight, memory_format=torch.channels_last).copy_(weight.data)
        if compile:
            self.net.compile()  # in place, so that checkpoints keep the names of the parameters
        self.lr, self.lr_scale, self.warmup_epochs, self.momentum = lr, lr_scale, warmup_epochs, momentum
        self.val_acc = MulticlassAccuracy(num_classes, average="micro")
        self.test_acc = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Logits (N, num_classes) of images (N, 1, 28, 28)."""
        logits: Tensor = self.net(images)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean cross-entropy of the batch."""
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        # The step's loss is this rank's: a collective in every step would cost more than LeNet's gradients.
        self.log("train_loss", loss, prog_bar=True, batch_size=len(labels))
        self.log("train_loss_epoch", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(labels))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Logs `val_loss` and `val_acc`."""
        self._evaluate(batch, "val", self.val_acc)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Logs `test_loss` and `test_acc`."""
        self._evaluate(batch, "test", self.test_acc)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Labels (N,) of images, or of the images of a (images, labels) pair."""
        images = batch[0] if isinstance(batch, (list, tuple)) else batch
        labels: Tensor = self(images).argmax(dim=1)
        return labels

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """SGD, and a schedule that changes the rate with every optimizer step."""
        optimizer = torch.optim.SGD(self.parameters(), self.lr * self.lr_scale, self.momentum)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate_factor())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _rate_factor(self) -> Any:
        num_steps = max(1, int(self.trainer.estimated_stepping_batches))
        num_epochs = self.trainer.max_epochs or 1
        warmup_steps = round(num_steps * min(1.0, self.warmup_epochs / num_epochs)) if num_epochs > 0 else 0
        start = 1 / self.lr_scale if self.lr_scale > 1 else 0.0

        def factor(step: int) -> float:
            if step < warmup_steps:
                return start + (1 - start) * (step + 1) / warmup_steps
            return 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / max(1, num_steps - warmup_steps)))

        return factor

    def _evaluate(self, batch: tuple[Tensor, Tensor], stage: str, accuracy: MulticlassAccuracy) -> None:
        images, labels = batch
        logits = self(images)
        accuracy.update(logits, labels)
        loss = nn.functional.cross_entropy(logits, labels)
        self.log(f"{stage}_loss", loss, sync_dist=True, batch_size=len(labels))
        self.log(f"{stage}_acc", accuracy, prog_bar=True)
