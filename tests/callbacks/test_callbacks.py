from __future__ import annotations

import time

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from matplotlib.image import imread
from torch.utils.data import DataLoader

from lit_parallel.callbacks import LearningCurve, Throughput
from lit_parallel.models import LitClassifier
from tests.models.test_models import images
from tests.strategies.fits import QUIET, Plain, dataset


class Slow(Plain):
    def training_step(self, batch, batch_idx):
        time.sleep(0.05)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        time.sleep(0.5)


def test_an_epochs_seconds_leave_out_validation():
    throughput = Throughput()
    data = DataLoader(dataset(96), batch_size=24)
    Trainer(**QUIET, strategy="single", devices=1, max_epochs=2, callbacks=[throughput]).fit(Slow(), data, data)
    assert 4 * 0.05 <= throughput.seconds_per_epoch < 4 * 0.5


def test_the_curve_is_drawn_and_continued(tmp_path):
    options = {**QUIET, "strategy": "single", "devices": 1, "default_root_dir": tmp_path}
    curve = LearningCurve("a title")
    trainer = Trainer(**options, max_epochs=2, callbacks=[curve, Throughput()])
    trainer.fit(LitClassifier("lenet"), images(), images())
    assert imread(tmp_path / "learning_curve.png").std() > 0.05
    trainer.save_checkpoint(tmp_path / "last.ckpt")

    again, throughput = LearningCurve("a title"), Throughput()
    trainer = Trainer(**options, max_epochs=3, callbacks=[again, throughput])
    trainer.fit(LitClassifier("lenet"), images(), images(), ckpt_path=tmp_path / "last.ckpt")
    assert len(again._history["val_acc"]) == len(throughput._seconds) == 3
    assert again._history["val_acc"][:2] == curve._history["val_acc"]


def test_a_missing_metric_is_named(tmp_path):
    trainer = Trainer(
        **QUIET, strategy="single", devices=1, max_epochs=1, default_root_dir=tmp_path, callbacks=[LearningCurve("")]
    )
    with pytest.raises(MisconfigurationException, match="'train_loss_epoch' was not logged; logged were: none"):
        trainer.fit(Plain(), DataLoader(dataset(24), batch_size=24))
