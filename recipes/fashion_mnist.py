"""Trains LeNet or ResNet-18 on Fashion-MNIST, with any way of synchronising data-parallel training.

    python recipes/fashion_mnist.py --strategy ring --devices 2
    python recipes/fashion_mnist.py --strategy single --devices 1
    python recipes/fashion_mnist.py --strategy dp --model resnet18 --precision bf16-mixed
    python recipes/fashion_mnist.py --strategy ps_ssp --devices 2 --servers 2 --staleness 4
    python recipes/fashion_mnist.py --config my_flags.yaml

--strategy alone swaps between one device, DP, DDP and the package's own algorithms. At the end it prints one line of
results, and leaves learning_curve.png, metrics.csv and the last checkpoint in a new folder of --output-dir.
"""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path
from typing import Literal, NoReturn

import torch
from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lit_parallel import PushPullStrategy
from lit_parallel.callbacks import LearningCurve, PullStatistics, Throughput
from lit_parallel.data import FashionMNISTDataModule
from lit_parallel.models import LitClassifier, ModelName
from lit_parallel.schedules import available_algorithms
from lit_parallel.strategies import PUSH_PULL_STALENESS

SMALL_DATA = Path(__file__).parent / "data"
# A remark of torch's to Lightning, about Lightning's own code.
warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)

STRATEGIES = ("single", "dp", "ddp", *available_algorithms(), *PUSH_PULL_STALENESS)


class _HelpFormatter(DefaultHelpFormatter):
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text  # the commands above keep their lines


class _Parser(ArgumentParser):
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        fail(re.sub(r'Parser key "(\w+)":', lambda key: "--" + key[1].replace("_", "-") + ":", message))


def fail(message: object) -> NoReturn:
    """Ends with one clear line and exit code 2."""
    print(f"fashion_mnist.py: error: {' '.join(str(message).split())}", file=sys.stderr)
    sys.exit(2)


def make_parser() -> ArgumentParser:
    """All flags, on the command line or in a YAML file."""
    parser = _Parser(description=__doc__, formatter_class=_HelpFormatter)
    add = parser.add_argument
    add("--config", action="config", help="YAML file with flags (underscores for dashes)")
    add("--strategy", type=Literal[STRATEGIES], default="ring", help="how training is synchronised")
    add("--devices", type=PositiveInt, default=2, help="devices per machine; on CPU processes, or for dp threads")
    add("--num-nodes", type=PositiveInt, default=1, help="machines; set MASTER_ADDR, MASTER_PORT and NODE_RANK on each")
    add("--accelerator", type=Literal["auto", "cpu", "gpu"], default="auto", help="what to train on")
    add(
        "--precision",
        type=Literal["32-true", "64-true", "bf16-mixed", "16-mixed"],
        default="32-true",
        help="number format; bf16-mixed is faster on most recent hardware",
    )
    add("--model", type=ModelName, default="lenet", help="lenet has 129,068 parameters, resnet18 11,175,818")
    add("--batch-size", type=PositiveInt, default=128, help="global batch size, split over all devices")
    add("--lr", type=PositiveFloat, default=0.1, help="learning rate; it falls to zero along a cosine")
    add("--epochs", type=PositiveInt, default=15, help="passes over the training images")
    add(
        "--linear-scaling",
        action="store_true",
        help="multiply batch size and learning rate by the number of devices (Goyal et al. 2017)",
    )
    add(
        "--warmup-epochs",
        type=NonNegativeFloat | None,
        help="epochs in which the learning rate climbs; unless given, 1 with --linear-scaling and else 0",
    )
    add("--accumulate-grad-batches", type=PositiveInt, default=1, help="batches per optimizer step")
    add("--servers", type=PositiveInt | None, help="server processes of their own, for ps, ps_async and ps_ssp")
    add("--staleness", type=NonNegativeInt | None, help="batches that a device may be ahead, for ps_ssp (4)")
    add("--channels-last", action="store_true", help="channels innermost; with bf16-mixed the fastest on most CPUs")
    add("--compile", action="store_true", help="compile the model with torch.compile")
    add("--data-dir", type=Path | None, help="folder with Fashion-MNIST; unless given, it is searched, then downloaded")
    add("--limit-train-batches", type=PositiveInt | None, help="batches per epoch, for a quick try")
    add("--seed", type=NonNegativeInt, default=0, help="of the weights and of the order of images")
    add("--output-dir", type=Path, default=Path("output"), help="where results are written")
    add("--ckpt-path", type=Path | None, help="checkpoint to go on from")
    return parser


def make_strategy(flags: Namespace) -> str | PushPullStrategy:
    """What the Trainer takes: a name, or an object where there are flags for it."""
    name = flags.strategy
    if flags.servers is not None and name not in ("ps", *PUSH_PULL_STALENESS):
        raise ValueError(f"--servers {flags.servers} needs a parameter server: --strategy ps, ps_async or ps_ssp.")
    if flags.staleness is not None and name != "ps_ssp":
        raise ValueError(f"--staleness {flags.staleness} needs --strategy ps_ssp.")
    if flags.servers is None and flags.staleness is None:
        return str(name)
    staleness = {"ps": 0, **PUSH_PULL_STALENESS}[name] if flags.staleness is None else flags.staleness
    return PushPullStrategy(staleness=staleness, servers=flags.servers)


def train(flags: Namespace) -> None:
    """Trains, tests and draws."""
    world_size = flags.devices * flags.num_nodes
    scale = world_size if flags.linear_scaling else 1
    if flags.batch_size * scale < world_size:
        raise ValueError(
            f"--batch-size {flags.batch_size} is smaller than the number of devices ({world_size}): each needs at least"
            f" one image. Use --batch-size {world_size} or more, or fewer devices."
        )
    if flags.ckpt_path is not None and not flags.ckpt_path.is_file():
        raise ValueError(f"--ckpt-path {flags.ckpt_path}: there is no such file.")
    flags.output_dir.mkdir(parents=True, exist_ok=True)

    seed_everything(flags.seed, verbose=False)
    data = FashionMNISTDataModule(flags.batch_size * scale, flags.data_dir, fallback_dir=SMALL_DATA, seed=flags.seed)
    warmup_epochs = flags.linear_scaling if flags.warmup_epochs is None else flags.warmup_epochs
    model = LitClassifier(
        flags.model,
        lr=float(flags.lr),  # plain numbers: checkpoints hold them, and load without this program's types
        lr_scale=scale,
        warmup_epochs=float(warmup_epochs),
        channels_last=flags.channels_last,
        compile=flags.compile,
    )

    strategy = make_strategy(flags)
    throughput = Throughput()
    checkpoint = ModelCheckpoint(filename="last")
    curve = LearningCurve(f"{flags.model}, {flags.strategy}, {world_size} device(s)")
    callbacks: list[Callback] = [throughput, checkpoint, curve]
    if flags.strategy in PUSH_PULL_STALENESS or isinstance(strategy, PushPullStrategy):
        callbacks.append(PullStatistics())
    trainer = Trainer(
        strategy=strategy,
        devices=flags.devices,
        num_nodes=flags.num_nodes,
        accelerator=flags.accelerator,
        precision=flags.precision,
        max_epochs=flags.epochs,
        accumulate_grad_batches=flags.accumulate_grad_batches,
        limit_train_batches=flags.limit_train_batches,
        callbacks=callbacks,
        logger=CSVLogger(flags.output_dir, name=""),
        log_every_n_steps=min(20, flags.limit_train_batches or 20),
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=data, ckpt_path=flags.ckpt_path)
    (metrics,) = trainer.test(model, datamodule=data, verbose=False)

    if trainer.is_global_zero:
        seconds = throughput.seconds_per_epoch
        device = torch.cuda.get_device_name() if trainer.strategy.root_device.type == "cuda" else "cpu"
        print(f"learning curve: {curve.path}")
        print(f"metrics: {curve.path.with_name('metrics.csv')}")
        print(f"checkpoint: {checkpoint.best_model_path}")
        print(
            f"test acc: {metrics['test_acc']:.3f}, {seconds:.1f} sec/epoch,"
            f" {trainer.num_training_batches * data.batch_size / seconds:.1f} samples/sec"
            f" with {flags.strategy} on {world_size} x {device}"
        )


if __name__ == "__main__":
    try:
        train(make_parser().parse_args())
    except (ValueError, OSError, MisconfigurationException) as error:
        fail(error)
