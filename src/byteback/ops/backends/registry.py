# SPDX-License-Identifier: Apache-2.0
"""Chooses the backend that runs an operator on given tensors, once for each call. No other file decides this.

    device "meta"      meta: shapes only
    a GPU              triton, if its kernels run there (gpu.py), else the reference
    another device     reference
    device "cpu"       the current path (paths.py): the reference, or the native library

The reference also runs empty tensors, and tensors with the negative bit, such as x.conj().imag, whose memory contains -x. To
add a backend, add a folder beside reference/ and a line in `_BY_DEVICE` or `_BY_PATH`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from byteback.ops.backends import gpu, meta, paths, reference
from byteback.ops.backends.cpu import detect, library
from byteback.ops.backends.cpu.backend import Cpu

Backend = Any
"""A namespace with the functions listed in reference/__init__.py."""

_BY_DEVICE: dict[str, Backend] = {"meta": meta}
_BY_PATH: dict[str, Backend] = {"reference": reference, **{name: Cpu(number) for name, number in library.NUMBERS.items()}}
_current = paths.current


def backend_for(op: str, first: Tensor, *others: Tensor | None) -> Backend:
    """Returns the backend that runs `op` on these tensors, which must be on one device.

    >>> import torch
    >>> backend_for("quantize", torch.zeros(2, 3, device="meta")) is meta
    True
    """
    library.last_kernel = ""
    if not first.is_cpu or first.is_neg():
        return _elsewhere(op, (first, *others))
    for tensor in others:
        if tensor is not None and (not tensor.is_cpu or tensor.is_neg()):
            return _elsewhere(op, (first, *others))
    return _BY_PATH[_current()] if first.numel() else reference


def backend_of(x: Tensor) -> Backend:
    """Returns the backend of dense tensors on the device of x. x itself may be a subclass without storage."""
    return _BY_PATH[_current()] if x.is_cpu else backend_on(x.device)


def runs_blocks(x: Tensor) -> bool:
    """Whether fused blocks run on the device of x. With the reference they would be slower than single layers."""
    return x.is_cpu or backend_on(x.device) is not reference


def detection_of(*tensors: Tensor) -> Any:
    """Returns the module with nms and roi_align for these tensors; None if the caller must compute them with PyTorch.

    They are float operators of torchvision, so no path has its own, and they have no reference here.
    """
    ready = library.native is not None and all(x.is_cpu and x.dtype == torch.float32 for x in tensors)
    return detect if ready else None


def _elsewhere(op: str, tensors: tuple[Tensor | None, ...]) -> Backend:
    """Returns the backend of tensors that the native library cannot read."""
    same_device(op, tensors)
    first = tensors[0]
    assert first is not None
    if first.device.type in _BY_DEVICE:
        return _BY_DEVICE[first.device.type]
    unreadable = not first.numel() or any(tensor is not None and tensor.is_neg() for tensor in tensors)
    return reference if first.is_cpu or unreadable else backend_on(first.device)


def backend_on(device: Any) -> Backend:
    """Returns the backend of a device other than the CPU. A GPU also runs on the reference if that path is chosen."""
    if device.type in _BY_DEVICE:
        return _BY_DEVICE[device.type]
    return reference if paths.is_chosen() and _current() == "reference" else gpu.backend(device)


def same_device(op: str, arguments: Iterable[Any]) -> None:
    """Raises ValueError if tensors are on different devices. Other arguments are ignored.

    >>> import torch
    >>> same_device("quantize", (torch.zeros(2), None, torch.zeros(3, device="meta")))
    Traceback (most recent call last):
    ValueError: quantize: a tensor of shape (2,) is on cpu, but one of shape (3,) is on meta; ...
    """
    first: Tensor | None = None
    for argument in arguments:
        if not isinstance(argument, Tensor):
            continue
        if first is None:
            first = argument
        elif argument.device != first.device:
            raise ValueError(
                f"{op}: a tensor of shape {tuple(first.shape)} is on {first.device}, but one of shape {tuple(argument.shape)} "
                f"is on {argument.device}; all tensors must be on one device. Move them with .to(device)."
            )
