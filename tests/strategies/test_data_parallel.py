"""`strategy="dp"` against one device with the whole batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MeanMetric, MetricCollection
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassPrecision
from torchmetrics.regression import PearsonCorrCoef

from lit_parallel.strategies.data_parallel.scatter import gather, scatter
from tests.strategies.fits import QUIET, Plain, WithBatchNorm, dataset, fit

CPUS = [torch.device("cpu")] * 4


@pytest.mark.parametrize("scenario", ["plain", "accumulation", "clipping"])
@pytest.mark.parametrize("devices", [2, 3])
def test_weights_equal_one_device(scenario, devices):
    one = fit("single", 1, scenario, precision="64-true")
    many = fit("dp", devices, scenario, precision="64-true")
    for key, value in one.items():
        torch.testing.assert_close(many[key], value, rtol=1e-10, atol=1e-12)


def test_bf16_runs_in_the_threads_too():
    one, many = (fit(strategy, devices, "bf16") for strategy, devices in (("single", 1), ("dp", 2)))
    for key, value in one.items():
        torch.testing.assert_close(many[key], value, rtol=0, atol=0.02)


class SawDtype(Plain):
    dtypes: list[torch.dtype]

    def training_step(self, batch, batch_idx):
        images, labels = batch
        logits = self.net(images)
        self.dtypes.append(logits.dtype)
        return nn.functional.cross_entropy(logits, labels)


def test_autocast_reaches_every_replica():
    module = SawDtype()
    module.dtypes = []
    Trainer(**QUIET, strategy="dp", devices=3, precision="bf16-mixed", max_steps=1).fit(
        module, DataLoader(dataset(9), batch_size=9)
    )
    assert module.dtypes == [torch.bfloat16] * 3


@pytest.mark.parametrize("devices", [2, 4])
def test_batch_normalisation_is_per_replica_and_device_0s_is_kept(devices):
    data = dataset(24)
    torch.manual_seed(3)
    module, alone = WithBatchNorm(), WithBatchNorm()
    alone.load_state_dict(module.state_dict())
    Trainer(**QUIET, strategy="dp", devices=devices, max_steps=1).fit(module, DataLoader(data, batch_size=24))
    # Device 0's statistics are what it computes from its own share of the samples.
    alone.train()
    alone.net(data.tensors[0].tensor_split(devices)[0])
    torch.testing.assert_close(module.net[1].running_mean, alone.net[1].running_mean)
    torch.testing.assert_close(module.net[1].running_var, alone.net[1].running_var)
    assert module.net[1].num_batches_tracked == 1


class Logging(Plain):
    """Logs in every way."""

    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.many = MetricCollection(
            {"precision": MulticlassPrecision(3), "accuracy": MulticlassAccuracy(3)}, prefix="many_"
        )
        self.auroc = BinaryAUROC()  # keeps every prediction
        self.largest = MaxMetric()
        self.mean = MeanMetric()

    def training_step(self, batch, batch_idx):
        images, labels = batch
        logits = self.net(images)
        losses = nn.functional.cross_entropy(logits, labels, reduction="none")
        self.log("loss", losses.mean(), on_step=True, on_epoch=True)
        self.log("sum", losses.sum(), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("max", losses.max(), reduce_fx=torch.max, on_step=True, on_epoch=True)
        self.log("min", losses.min(), reduce_fx="min", on_step=True, on_epoch=True)
        self.log("share", (labels == 0).sum() / len(labels), on_step=True, on_epoch=True, batch_size=len(labels))
        self.accuracy(logits, labels)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log_dict(self.many(logits, labels), on_step=True, on_epoch=False)
        self.largest.update(losses)
        self.mean.update(losses)
        self.log("largest", self.largest, on_step=False, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("constant", 3.0, on_step=False, on_epoch=True)
        return losses.mean()

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        logits = self.net(images)
        self.many.update(logits, labels)
        self.auroc.update(logits.softmax(1)[:, 0], (labels == 0).int())
        self.log_dict(self.many)
        self.log("auroc", self.auroc)
        self.log("val_loss", nn.functional.cross_entropy(logits, labels))


class Recorder(Callback):
    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, *args):
        self.steps.append({key: value.item() for key, value in trainer.callback_metrics.items() if "val" not in key})


def logged(strategy, devices):
    torch.manual_seed(5)
    module, recorder = Logging(), Recorder()
    data = dataset(70)  # the last batch has 6 samples, too few for an even split over 4
    trainer = Trainer(**QUIET, strategy=strategy, devices=devices, max_epochs=2, callbacks=[recorder])
    trainer.fit(module, DataLoader(data, batch_size=16), DataLoader(data, batch_size=13))
    return recorder.steps, {key: value.item() for key, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("devices", [2, 4])
def test_logs_and_metrics_count_every_sample_once(devices):
    steps, end = logged("single", 1)
    dp_steps, dp_end = logged("dp", devices)
    assert end.keys() == dp_end.keys()
    assert {"loss_epoch", "accuracy_epoch", "largest", "mean", "auroc", "many_precision", "val_loss"} <= end.keys()
    for key, value in end.items():
        assert dp_end[key] == pytest.approx(value, abs=1e-5), key
    for one, many in zip(steps, dp_steps, strict=True):
        assert one.keys() == many.keys()
        for key, value in one.items():
            # The collection's values in training are macro averages: those of shards do not average to the batch's.
            if not key.startswith("many_"):
                assert many[key] == pytest.approx(value, abs=1e-5), key


class Outputs(Plain):
    def training_step(self, batch, batch_idx):
        return {
            "loss": super().training_step(batch, batch_idx),
            "labels": batch[1],
            "count": torch.tensor(len(batch[1])),
        }

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert torch.equal(outputs["labels"], batch[1])
        assert outputs["count"] == len(batch[1])
        assert outputs["loss"].dim() == 0

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])


@pytest.mark.parametrize("batch_size", [1, 2, 7])
def test_outputs_are_those_of_the_whole_batch(batch_size):
    data = DataLoader(dataset(14), batch_size=batch_size)
    module = Outputs()
    trainer = Trainer(**QUIET, strategy="dp", devices=4, max_epochs=1)
    trainer.fit(module, data)
    predicted = torch.cat(trainer.predict(module, data))
    with torch.no_grad():
        torch.testing.assert_close(predicted, module.net(dataset(14).tensors[0]))


class Recurrent(Plain):
    """An LSTM keeps its weights in a list beside its parameters; the embedding is tied to the output."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.output = nn.Linear(8, 6, bias=False)
        self.output.weight = self.embedding.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        (tokens,) = batch
        states, _ = self.lstm(self.frozen(self.embedding(tokens)))
        return nn.functional.cross_entropy(self.output(states).flatten(0, 1), tokens.flatten())


def test_recurrent_tied_and_frozen_weights():
    tokens = TensorDataset(torch.randint(6, (12, 5), generator=torch.Generator().manual_seed(1)))
    states = []
    for strategy, devices in (("single", 1), ("dp", 3)):
        torch.manual_seed(2)
        module = Recurrent()
        Trainer(**QUIET, strategy=strategy, devices=devices, max_epochs=3).fit(module, DataLoader(tokens, batch_size=6))
        states.append(module.state_dict())
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=1e-4, atol=1e-6)


class UsedByOneDevice(Plain):
    """Only the last sample's device uses the extra layer."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(3, 3)
        self.never = nn.Linear(3, 3)

    def training_step(self, batch, batch_idx):
        images, _ = batch
        logits = self.net(images)
        if (images[-1] == dataset(8).tensors[0][-1]).all():
            logits = self.extra(logits)
        return logits.square().mean()

    def on_before_optimizer_step(self, optimizer):
        assert self.extra.weight.grad is not None
        assert self.never.weight.grad is None


def test_parameters_that_only_some_devices_use():
    Trainer(**QUIET, strategy="dp", devices=2, max_steps=1).fit(UsedByOneDevice(), DataLoader(dataset(8), batch_size=8))


class Failing(Plain):
    def __init__(self, where):
        super().__init__()
        self.where = where

    def training_step(self, batch, batch_idx):
        if torch.equal(batch[1], dataset(8).tensors[1].tensor_split(2)[self.where]):
            raise RuntimeError(f"device {self.where} failed")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("where", [0, 1])
def test_an_error_on_any_device_ends_training(where):
    module = Failing(where)
    with pytest.raises(RuntimeError, match=f"device {where} failed"):
        Trainer(**QUIET, strategy="dp", devices=2, max_steps=1).fit(module, DataLoader(dataset(8), batch_size=8))
    assert "log" not in vars(module)


class Sometimes(Plain):
    def training_step(self, batch, batch_idx):
        return None if len(batch[1]) == 3 else super().training_step(batch, batch_idx)


def test_a_loss_on_some_devices_only_is_refused():
    with pytest.raises(TypeError, match="on all devices or None on all"):
        Trainer(**QUIET, strategy="dp", devices=2, max_steps=1).fit(Sometimes(), DataLoader(dataset(7), batch_size=7))


class Manual(Plain):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Compiled(Plain):
    def __init__(self):
        super().__init__()
        self.net.compile()


class WithSyncBatchNorm(Plain):
    def __init__(self):
        super().__init__()
        self.norm = nn.SyncBatchNorm(3)


class WithSparse(Plain):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(3, 3, sparse=True)


class WithOddMetric(Plain):
    def __init__(self):
        super().__init__()
        self.correlation = PearsonCorrCoef()


@pytest.mark.parametrize(
    ("make_module", "options", "error", "message"),
    [
        (Manual, {}, ValueError, "automatic optimization only"),
        (Plain, {"sync_batchnorm": True}, ValueError, "cannot synchronise batch normalisation"),
        (WithSyncBatchNorm, {}, ValueError, "cannot synchronise batch normalisation"),
        (Compiled, {}, ValueError, r"cannot replicate a compiled module \(net\)"),
        (lambda: torch.compile(Plain()), {}, RuntimeError, "compiled model is incompatible with the current strategy"),
        (WithSparse, {}, ValueError, r"sparse gradients \(embedding\)"),
        (WithOddMetric, {}, TypeError, "cannot add up the metric 'correlation'"),
    ],
)
def test_what_cannot_work_is_refused_before_training(make_module, options, error, message):
    with pytest.raises(error, match=message):
        Trainer(**QUIET, strategy="dp", devices=2, max_steps=1, **options).fit(
            make_module(), DataLoader(dataset(8), batch_size=8)
        )


def test_several_machines_are_refused():
    with pytest.raises(ValueError, match=r"one machine, but num_nodes=2. Use a strategy"):
        Trainer(**QUIET, strategy="dp", devices=2, num_nodes=2)


def test_the_trainer_sees_one_process_and_all_devices():
    trainer = Trainer(**QUIET, strategy="dp", devices=3)
    assert (trainer.world_size, trainer.num_devices, trainer.global_rank) == (1, 3, 0)
    assert trainer.strategy.launcher is None


class Pair(NamedTuple):
    images: torch.Tensor
    names: list[str]


@dataclass
class Batch:
    images: torch.Tensor
    note: str


@pytest.mark.parametrize(
    ("num_samples", "expected"), [(4, [1, 1, 1, 1]), (7, [2, 2, 2, 1]), (8, [2, 2, 2, 2]), (3, [1, 1, 1]), (1, [1])]
)
def test_scatter_uses_every_sample_once(num_samples, expected):
    images = torch.arange(num_samples)
    for batch in (
        {"a": [images, "text"]},
        (images, images + 1, torch.tensor(5)),
        Pair(images, ["x"]),
        Batch(images, "n"),
    ):
        shards = scatter((batch, 3), CPUS)
        assert [shard.num_samples for shard in shards] == expected
        assert all(type(shard.arguments[0]) is type(batch) and shard.arguments[1] == 3 for shard in shards)
    first = [shard.arguments[0] for shard in scatter(((images,), 3), CPUS)]
    assert torch.equal(torch.cat([part for (part,) in first]), images)
    assert scatter((Pair(images, ["x"]), 3), CPUS)[0].arguments[0].names == ["x"]


def test_a_batch_without_tensors_goes_to_the_first_device():
    (shard,) = scatter((["a", "b"], 0), CPUS)
    assert shard.arguments == (["a", "b"], 0)


def test_tensors_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match=r"lengths there differ: \(4,\), \(5, 2\)"):
        scatter(((torch.ones(4), torch.ones(5, 2)), 0), CPUS)


def test_gather_walks_every_structure():
    outputs = [
        {"a": torch.ones(2), "mean": torch.tensor(1.0), "count": torch.tensor(2), "pair": Pair(torch.ones(1), ["x"])},
        {"a": torch.zeros(1), "mean": torch.tensor(4.0), "count": torch.tensor(1), "pair": Pair(torch.zeros(1), ["y"])},
    ]
    together = gather(outputs, [2 / 3, 1 / 3], torch.device("cpu"))
    assert together["a"].tolist() == [1, 1, 0]
    assert together["mean"].item() == pytest.approx(2)
    assert together["count"].item() == 3
    assert together["pair"].images.tolist() == [1, 0]
    assert together["pair"].names == ["x"]
