"""Copies of a module on other devices that live for one step."""

from __future__ import annotations

import torch
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from torch import Tensor
from torch.nn import Module, Parameter

from lit_parallel.schedules.central import reduce_to_root
from lit_parallel.transports.in_memory import InMemoryTransport


class Replica:
    """A copy of a module on a device, with its own gradients and buffers.

    The copy is made anew for every step, so it sees every change of the original: attributes, training mode, frozen
    parameters. It costs a shallow copy of each submodule's `__dict__`, a copy of the buffers, and a copy of the
    parameters where the device is another one; on the same device the weights are shared. What the copy's forward
    assigns to attributes or buffers is lost.

    Args:
        original: The module on the root device.
        device: Where the copy lives.
        replacements: Submodules (by the id of the original's) that the copy uses as they are.
    """

    def __init__(self, original: Module, device: torch.device, replacements: dict[int, Module]) -> None:
        self._device = device
        self._modules: dict[int, Module] = dict(replacements)
        self._parameters: dict[int, Parameter] = {}
        self.module = self._copy(original)

    def gradient(self, parameter: Parameter) -> Tensor | None:
        """The gradient of this replica's copy of one of the original's parameters."""
        return self._parameters[id(parameter)].grad

    def _copy(self, module: Module) -> Module:
        if id(module) in self._modules:
            return self._modules[id(module)]
        # Torch's own hook for data parallelism: modules with more than parameters to copy (RNNs) override it.
        copy: Module = module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        self._modules[id(module)] = copy
        if isinstance(copy, _DeviceDtypeModuleMixin):
            copy._device = self._device
        for name, child in module._modules.items():
            copy._modules[name] = None if child is None else self._copy(child)
        for name, buffer in module._buffers.items():
            copy._buffers[name] = None if buffer is None else buffer.detach().to(self._device, copy=True)
        for name, parameter in module._parameters.items():
            if parameter is None:
                copy._parameters[name] = None
            else:
                setattr(copy, name, self._copy_parameter(parameter))
        return copy

    def _copy_parameter(self, parameter: Parameter) -> Parameter:
        if id(parameter) not in self._parameters:
            value = parameter.detach().to(self._device, non_blocking=True)
            self._parameters[id(parameter)] = Parameter(value, requires_grad=parameter.requires_grad)
        return self._parameters[id(parameter)]


def add_gradients(original: Module, replicas: list[Replica]) -> None:
    """Adds the gradients of all replicas into the original's, in the order of the devices.

    Parameters that no device used keep `grad is None`.
    """
    for parameter in original.parameters():
        gradients = [gradient for replica in replicas if (gradient := replica.gradient(parameter)) is not None]
        if not gradients:
            continue
        if parameter.grad is None:
            # The root's samples did not use this parameter.
            parameter.grad = torch.empty_like(parameter).copy_(gradients.pop(0))
        transport = InMemoryTransport(1 + len(gradients))
        flat = [_in_memory_order(gradient, parameter.grad) for gradient in (parameter.grad, *gradients)]
        transport.run(reduce_to_root(transport.world_size), *flat)


def _in_memory_order(tensor: Tensor, like: Tensor) -> Tensor:
    """A flat view of a dense tensor's memory, laid out like another tensor's (channels-last, say)."""
    if tensor.stride() != like.stride():
        tensor = torch.empty_like(like, device=tensor.device).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))
