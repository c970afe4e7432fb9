# SPDX-License-Identifier: Apache-2.0
"""memory: the peak memory of a step, part by part, beside float32's. tune_malloc: keeps freed memory in the process.

glibc returns every block above 32 MB to the system when it is freed, and also trims the top of its heap. The pages of the next
tensor of that size are then allocated again, which can take longer than the convolution that fills it. This slows down the
float layers of PyTorch as much as int8 layers.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from byteback import tables
from byteback.nn import FusedConvolution, Int8Layer
from byteback.nn.fused.sources import LazyActivation
from byteback.ops.backends.cpu import allocator

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LARGEST = 2**31 - 1  # mallopt takes an int
_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_SAMPLE_SECONDS = 0.001
_SLACK = 16 << 20  # bytes that may be allocated between resetting the peak and reading it back


def tune_malloc() -> bool:
    """Makes glibc keep freed memory in this process. Returns False if the C library is not glibc.

    The memory of the process then stays at its peak. Call it once, before training.
    """
    libc = _libc()
    if libc is None:
        return False
    settings = ((_M_MMAP_THRESHOLD, _LARGEST), (_M_TRIM_THRESHOLD, _LARGEST), (_M_TOP_PAD, 64 << 20))
    return all(libc.mallopt(option, value) == 1 for option, value in settings)


def _libc() -> Any:
    """Returns glibc, or None on another system or with another C library."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        libc = ctypes.CDLL("libc.so.6")
        return libc if libc.mallopt and libc.malloc_trim else None
    except (OSError, AttributeError):
        return None


@dataclass(frozen=True)
class MemoryReport(tables.Table):
    """The result of `memory`, in bytes. Prints as a table."""

    model: str
    saved_by_dtype: dict[str, tuple[int, int]]
    """dtype -> (storages, bytes) that autograd stores from forward to backward, without parameters and buffers."""
    parameters: int
    """Bytes of parameters and buffers that autograd also refers to. They take no additional memory."""
    pooled: int
    """Bytes of unused buffers that are kept between the passes for the next one."""
    peak: int | None
    """Growth of the resident memory of the process in a forward and backward pass, with gradients; None if unknown."""
    weights: int = 0
    """Bytes of parameters and buffers, whether or not autograd refers to them."""
    gradients: int = 0
    """Bytes of the gradients of parameters after the pass."""
    optimizer_state: int | None = None
    """Bytes of the state of the optimizer; None if no optimizer was passed."""
    int8_weights: int = 0
    """Bytes of int8 copies of parameters among those of `saved_by_dtype`."""
    float32: MemoryReport | None = None
    """The same model with its int8 layers switched to float, if it has some and `compare` was set."""

    @property
    def saved(self) -> int:
        """Bytes that are stored from forward to backward: by autograd, and unused in the pool."""
        return sum(size for _, size in self.saved_by_dtype.values()) + self.pooled

    @property
    def transient(self) -> int | None:
        """Bytes of the peak that are neither kept nor gradients: results within a pass, buffers between them, unused heap."""
        return None if self.peak is None else max(self.peak - self.gradients - self.saved + self.pooled, 0)

    def parts(self) -> dict[str, int | None]:
        """Returns what the peak of a training process is made of, in bytes. The last entry is the sum, if all are known."""
        parts = {
            "parameters and buffers": self.weights,
            "optimizer state": self.optimizer_state,
            "gradients": self.gradients,
            "int8 weights": self.int8_weights,
            "kept for backward": self.saved - self.pooled - self.int8_weights,
            "transient": self.transient,
        }
        known = [size for size in parts.values() if size is not None]
        return {**parts, "peak": None if self.transient is None else sum(known)}

    def _table(self) -> tables.Content:
        peak = "unknown here" if self.peak is None else _megabytes(self.peak)
        title = f"{self.model}: {_megabytes(self.saved)} saved for backward, peak {peak} above the model at rest"
        kinds = sorted(self.saved_by_dtype.items(), key=lambda item: -item[1][1])
        inside = {f"  {dtype}": size for dtype, (_, size) in kinds}
        other = {} if self.float32 is None else self.float32.parts()
        rows = []
        for name, size in self.parts().items():
            rows.append([name, _cell(size), *([_cell(other[name])] if other else [])])
            if name == "kept for backward":
                rows += [[kind, _cell(kept), *([""] if other else [])] for kind, kept in inside.items()]
        return title, ["part of the peak", "size", *(["float32"] if other else [])], rows, 1


def _cell(size: int | None) -> str:
    return "-" if size is None else _megabytes(size)


def _megabytes(size: int) -> str:
    return f"{size / 2**20:.1f} MB"


def memory(
    model: nn.Module, input: Tensor | tuple[Any, ...], optimizer: Optimizer | None = None, *, compare: bool = False
) -> MemoryReport:
    """Measures what a forward pass on `input` saves for backward, and the peak memory of both passes, part by part.

    A tuple as `input` is a list of arguments. Every storage that the saved-tensor hooks of autograd see is counted once. The
    passes run in training mode, twice: once to count, once for the peak. Afterwards parameters, buffers, gradients, flags and
    random state are as they were before. With `optimizer` its state counts too. With `compare` the int8 layers of a prepared
    model are measured a second time, in float32. `byteback bench memory` measures both sides in processes of their own.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.ReLU())
    >>> memory(model, torch.zeros(2, 3, 6, 6)).saved_by_dtype  # the input, and the output of ReLU: 4·2·(3·6·6 + 8·4·4)
    {'float32': (2, 1888)}
    """
    args = input if isinstance(input, tuple) else (input,)
    report = _measured(model, args, None if optimizer is None else _bytes(_tensors(optimizer.state_dict()["state"])))
    layers = [module for module in model.modules() if isinstance(module, (Int8Layer, FusedConvolution)) and module.enabled]
    if not compare or not layers:
        return report
    for layer in layers:
        layer.enabled = False
    try:
        return replace(report, float32=_measured(model, args, report.optimizer_state))
    finally:
        for layer in layers:
            layer.enabled = True


def _measured(model: nn.Module, args: tuple[Any, ...], optimizer_state: int | None) -> MemoryReport:
    """Counts in one pass, and measures the peak in a second one."""
    with as_it_was(model, args):
        found: dict[int, _Saved] = {}
        allocator.release()  # else buffers of earlier steps would count
        pooled = _forward_backward(model, args, found)
        gradients = _bytes(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    storages = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
    of_model = {storage.data_ptr(): storage.nbytes() for storage in storages}
    kept: dict[str, tuple[int, int]] = {}
    for address, saved in found.items():
        if address not in of_model:
            count, total = kept.get(saved.dtype, (0, 0))
            kept[saved.dtype] = (count + 1, total + saved.size)
    shapes = {parameter.shape for parameter in model.parameters()}
    with as_it_was(model, args):
        allocator.release()
        peak = peak_growth(lambda: _forward_backward(model, args, {}))
    return MemoryReport(
        model=type(model).__name__,
        saved_by_dtype=kept,
        parameters=sum(saved.size for address, saved in found.items() if address in of_model),
        pooled=pooled,
        peak=peak,
        weights=sum(of_model.values()),
        gradients=gradients,
        optimizer_state=optimizer_state,
        int8_weights=sum(saved.size for saved in found.values() if saved.dtype == "int8" and saved.shape in shapes),
    )


class _Saved(NamedTuple):
    """A storage that autograd saves."""

    dtype: str
    size: int
    shape: torch.Size  # of a tensor in it


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def _forward_backward(model: nn.Module, args: tuple[Any, ...], found: dict[int, _Saved]) -> int:
    """Runs both passes and adds the storages that autograd saves in the forward pass to `found`, by address.

    Returns the bytes of unused buffers in the pool between the passes.
    """
    held = []  # keeps storages alive: one that is freed and reused within the pass would be counted once instead of twice

    def pack(tensor: Tensor) -> Tensor:
        for part in _stored(tensor):
            storage = part.untyped_storage()
            held.append(storage)
            found[storage.data_ptr()] = _Saved(str(part.dtype).removeprefix("torch."), storage.nbytes(), part.shape)
        return tensor

    with torch.enable_grad():
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = [t for t in _tensors(model(*args)) if t.requires_grad]
        held.clear()
        pooled = allocator.idle()
        if not outputs:
            raise ValueError(
                f"memory: the output of this {type(model).__name__} does not require a gradient, so there is no backward pass "
                "to measure. Pass a model with parameters that require gradients."
            )
        torch.autograd.backward(outputs, [torch.full_like(t, 1.0 / t.numel()) for t in outputs])
    return pooled


def _stored(tensor: Tensor) -> list[Tensor]:
    """Returns the tensors that store the values of a tensor. An activation between blocks is computed from other tensors."""
    if not isinstance(tensor, LazyActivation):
        return [tensor]
    source = tensor.source
    made = source.tensors() if source is not None else []
    return made if tensor.written is None else [tensor.written, *made]


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors of a nested output."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for item in value:
            yield from _tensors(item)


@contextlib.contextmanager
def as_it_was(model: nn.Module, args: tuple[Any, ...]) -> Iterator[None]:
    """Puts the model into training mode and clears its gradients; restores everything at the end."""
    modules = list(model.modules())
    buffers = [dict(module._buffers) for module in modules]
    # Buffers, and the tensors that a module stores as plain attributes.
    tensors = [t for module in modules for t in (*module._buffers.values(), *vars(module).values()) if isinstance(t, Tensor)]
    contents = [tensor.clone() for tensor in tensors]
    plain = (bool, int, float, str, type(None))  # counters and flags, `training` among them
    flags = [{name: value for name, value in vars(module).items() if isinstance(value, plain)} for module in modules]
    leaves = (*model.parameters(), *(tensor for tensor in _tensors(args) if tensor.is_leaf))
    grads = [(leaf, leaf.grad) for leaf in leaves]
    if not model.training:  # in a model that is in training mode, frozen parts may be in eval mode on purpose
        model.train()
    for leaf, _ in grads:
        leaf.grad = None
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for module, own, kept in zip(modules, buffers, flags, strict=True):
            vars(module).update(kept)
            module._buffers.update(own)
        with torch.no_grad():
            for tensor, content in zip(tensors, contents, strict=True):
                tensor.copy_(content)
        for leaf, grad in grads:
            leaf.grad = grad


# ---- resident memory ------------------------------------------------------------------------------------------------


def resident() -> int | None:
    """Returns the resident memory of this process in bytes after returning freed memory to the system; None if unknown."""
    libc = _libc()
    if libc is not None:
        libc.malloc_trim(0)
    return _status("VmRSS")


def highest() -> int | None:
    """Returns the highest resident memory that this process has had (VmHWM); None if unknown."""
    return _status("VmHWM")


def peak_growth(run: Callable[[], object], base: int | None = None) -> int | None:
    """Returns how far resident memory rises above `base` (default: its current value) during `run`; None if unknown.

    Linux stores the peak as VmHWM, and writing 5 to /proc/self/clear_refs resets it. If that is not allowed, a thread reads
    VmRSS every millisecond, which can miss a short peak.
    """
    before = resident()
    if before is None:
        run()
        return None
    base = before if base is None else base
    if _reset_peak(before):
        run()
        most = highest()
    else:
        with _Sampler() as sampler:
            run()
        most = sampler.highest
    return None if most is None else max(most - base, 0)


def _status(field: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(field + ":")), None)


def _reset_peak(now: int) -> bool:
    """Resets VmHWM. Returns whether that worked: some sandboxes accept the write and ignore it."""
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    most = highest()
    return most is not None and most <= now + _SLACK


class _Sampler(threading.Thread):
    """Records the highest VmRSS between entering and leaving."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.highest: int | None = None
        self._over = threading.Event()

    def __enter__(self) -> _Sampler:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        while True:
            self.highest = max(self.highest or 0, _status("VmRSS") or 0) or None
            if self._over.wait(_SAMPLE_SECONDS):
                return
