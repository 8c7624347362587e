"""The tutorial's models, and the LightningModule that wraps them."""

from lit_parallel.models.lenet import lenet
from lit_parallel.models.lit_classifier import LitClassifier, ModelName
from lit_parallel.models.resnet18 import resnet18

__all__ = ["LitClassifier", "ModelName", "lenet", "resnet18"]
