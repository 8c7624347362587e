from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_parallel.models import LitClassifier, lenet, resnet18
from tests.strategies.fits import QUIET


@pytest.mark.parametrize(("net", "parameters"), [(lenet(), 129_068), (resnet18(), 11_175_818)])
def test_sizes_are_the_tutorials(net, parameters):
    assert sum(parameter.numel() for parameter in net.parameters()) == parameters
    assert net(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_lenet_is_the_tutorials_function():
    """Written with functions, as the tutorial's first version is."""
    torch.manual_seed(0)
    net, images = lenet(), torch.randn(3, 1, 28, 28)
    w1, b1, w2, b2, w3, b3, w4, b4 = net.parameters()
    hidden = nn.functional.avg_pool2d(nn.functional.conv2d(images, w1, b1).relu(), 2)
    hidden = nn.functional.avg_pool2d(nn.functional.conv2d(hidden, w2, b2).relu(), 2)
    hidden = (hidden.reshape(3, 800) @ w3.T + b3).relu()
    torch.testing.assert_close(net(images), hidden @ w4.T + b4)


def test_resnet18_starts_as_the_tutorials():
    torch.manual_seed(0)
    net = resnet18()
    convolutions = [module for module in net.modules() if isinstance(module, nn.Conv2d)]
    assert len(convolutions) == 1 + 16 + 3
    assert all(convolution.bias is not None for convolution in convolutions)
    assert convolutions[5].weight.std().item() == pytest.approx(0.01, rel=0.05)
    sizes = []
    for stage in (3, 5, 7, 9):
        net[stage].register_forward_hook(lambda module, inputs, output: sizes.append(tuple(output.shape[1:])))
    net(torch.zeros(1, 1, 28, 28))
    assert sizes == [(64, 28, 28), (128, 14, 14), (256, 7, 7), (512, 4, 4)]


def images(count=64):
    generator = torch.Generator().manual_seed(0)
    return DataLoader(
        TensorDataset(
            torch.rand(count, 1, 28, 28, generator=generator), torch.randint(10, (count,), generator=generator)
        ),
        batch_size=16,
    )


class Rates(LitClassifier):
    def __init__(self, **options):
        super().__init__(**options)
        self.rates = []

    def on_train_batch_start(self, batch, batch_idx):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def rates(**options):
    module = Rates(**options)
    Trainer(**QUIET, strategy="single", devices=1, max_epochs=4).fit(module, images(), images())
    return module.rates


def test_the_rate_falls_along_a_cosine():
    values = rates(lr=0.2)
    assert len(values) == 16
    assert values[0] == pytest.approx(0.2)
    assert values[8] == pytest.approx(0.1)
    assert values == sorted(values, reverse=True)


def test_linear_scaling_warms_up_from_one_devices_rate():
    values = rates(lr=0.1, lr_scale=4, warmup_epochs=1)
    assert values[0] == pytest.approx(0.1 * (1 + 3 / 4))
    assert values[3] == pytest.approx(0.4)
    assert max(values) == pytest.approx(0.4)


def test_warm_up_without_scaling_starts_from_zero():
    assert rates(lr=0.1, warmup_epochs=2)[:8] == pytest.approx([0.1 * (step + 1) / 8 for step in range(8)])


def test_metrics_equal_the_models_own_predictions():
    torch.manual_seed(1)
    module, data = LitClassifier("lenet"), images()
    trainer = Trainer(**QUIET, strategy="single", devices=1)
    (metrics,) = trainer.test(module, data, verbose=False)
    predictions = torch.cat(trainer.predict(module, data))
    labels = data.dataset.tensors[1]
    assert metrics["test_acc"] == pytest.approx((predictions == labels).float().mean().item())
    with torch.no_grad():
        loss = nn.functional.cross_entropy(module(data.dataset.tensors[0]), labels)
    assert metrics["test_loss"] == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("model", ["lenet", "resnet18"])
def test_channels_last_changes_the_layout_and_nothing_else(model):
    torch.manual_seed(0)
    plain = LitClassifier(model).eval()
    other = LitClassifier(model, channels_last=True).eval()
    other.load_state_dict(plain.state_dict())
    weights = [weight for weight in other.parameters() if weight.dim() == 4]
    assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)
    inputs = torch.randn(2, 1, 28, 28)
    torch.testing.assert_close(other(inputs), plain(inputs))
    other(inputs).sum().backward()
    for weight in other.parameters():  # else DDP copies each gradient into its bucket, and warns
        assert weight.grad.stride() == weight.stride()


def test_an_unknown_model_is_refused():
    with pytest.raises(ValueError, match="Unknown model 'alexnet'; choose one of lenet, resnet18"):
        LitClassifier("alexnet")
