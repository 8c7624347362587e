"""A picture of how training went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.imports import RequirementCache


class LearningCurve(Callback):
    """Draws training loss, validation loss and validation accuracy over the epochs, after each epoch.

    Args:
        title: Stands above the picture.
        filename: The PNG file in the run's folder, `trainer.log_dir` (without a logger, `trainer.default_root_dir`).

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """

    def __init__(self, title: str, filename: str = "learning_curve.png") -> None:
        if not (matplotlib := RequirementCache("matplotlib")):
            raise ModuleNotFoundError(
                f"LearningCurve draws with matplotlib: pip install 'lit_parallel[recipes]'. {matplotlib}"
            )
        self.title, self.filename = title, filename
        self.path = Path(filename)  # the run's folder is put before it when training starts
        self._history: dict[str, list[float]] = {"train_loss_epoch": [], "val_loss": [], "val_acc": []}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Asks for the run's folder: on every rank, because the Trainer broadcasts it."""
        self.path = Path(trainer.log_dir or trainer.default_root_dir) / self.filename

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes the epoch's metrics and draws."""
        for name, values in self._history.items():
            if name not in trainer.callback_metrics:
                raise MisconfigurationException(
                    f"LearningCurve draws {', '.join(self._history)}, but {name!r} was not logged;"
                    f" logged were: {', '.join(sorted(trainer.callback_metrics)) or 'none'}."
                )
            values.append(float(trainer.callback_metrics[name]))
        if trainer.is_global_zero:
            self._draw()

    def state_dict(self) -> dict[str, Any]:
        """The curve so far, for checkpoints."""
        return {"history": self._history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on drawing the curve of the checkpoint."""
        self._history = state_dict["history"]

    def _draw(self) -> None:
        # Imported here: matplotlib is optional, and slow to import.
        from matplotlib.figure import Figure  # noqa: PLC0415
        from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

        figure = Figure(figsize=(6, 4), layout="constrained")
        losses = figure.add_subplot(title=self.title, xlabel="epoch", ylabel="loss")
        losses.xaxis.set_major_locator(MaxNLocator(integer=True))
        accuracies = losses.twinx()
        accuracies.set(ylabel="accuracy", ylim=(0, 1))
        for axes, name, label, style in (
            (losses, "train_loss_epoch", "training loss", "C0o-"),
            (losses, "val_loss", "test loss", "C1s-"),
            (accuracies, "val_acc", "test accuracy", "C2^--"),
        ):
            values = self._history[name]
            axes.plot(range(1, len(values) + 1), values, style, label=label, markersize=4)
        losses.set_ylim(bottom=0)
        lines = [*losses.get_lines(), *accuracies.get_lines()]
        losses.legend(lines, [str(line.get_label()) for line in lines], loc="center right")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(self.path, dpi=150)
