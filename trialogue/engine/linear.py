# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false
"""Products with published weights, for the few rows of a decoding step on a CPU.

Matrix libraries are made for many rows: for a handful they bring the weights from memory at half the speed at
which it delivers. `product.c` does not, and is compiled when first needed; where there is no compiler,
oneDNN's own layout for small products is the next best. Either costs a second copy of the weights. Layers
that take the same input are joined: fewer, larger products.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

FEW_ROWS = 32
SMALL = 1 << 18
"""Weights in a matrix that gains nothing from being laid out anew."""
LANES = 8
"""Outputs in a panel of `product.c`."""
THREADS = 2
"""Among more than these handing out the work of `product.c` takes longer than it saves."""

Kernel = Callable[[int, int, int, int, int, int, int, int], None]


class Joined:
    """Linear layers side by side: [N, in] → [N, the sum of their outputs]. What is made of their weights is
    made when first needed and kept until `forget`: a version counter would not tell, as a fused optimizer
    does not count."""

    def __init__(self, *layers: nn.Linear) -> None:
        self.layers = layers
        self.outputs = sum(layer.out_features for layer in layers)
        self.is_large = sum(layer.weight.numel() for layer in layers) >= SMALL
        self.forget()

    def forget(self) -> None:
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.kernel: Kernel | None = None

    def __call__(self, inputs: Tensor) -> Tensor:
        if self.is_large and len(inputs) > FEW_ROWS:
            parts = [nn.functional.linear(inputs, layer.weight, layer.bias) for layer in self.layers]
            return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        weight = self._lay_out() if self.weight is None else self.weight
        if self.kernel is not None:
            output = multiply(self.kernel, inputs.contiguous(), weight)
            return output if self.bias is None else output.add_(self.bias)
        if weight.is_mkldnn:
            return torch.ops.mkldnn._linear_pointwise(inputs, weight, self.bias, "none", [], "")
        return nn.functional.linear(inputs, weight, self.bias)

    def _lay_out(self) -> Tensor:
        weight = join([layer.weight for layer in self.layers])
        if self.is_large and self.outputs % LANES == 0 and torch.get_num_threads() <= THREADS:
            self.kernel = load_kernel()
        if self.kernel is not None:
            weight = to_panels(weight)
        elif self.is_large and torch.backends.mkldnn.is_available():
            weight = cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(weight, FEW_ROWS))
        if any(cast("Tensor | None", layer.bias) is not None for layer in self.layers):
            self.bias = join([find_bias(layer) for layer in self.layers])
        self.weight = weight
        return weight


def join(parts: list[Tensor]) -> Tensor:
    return parts[0].detach() if len(parts) == 1 else torch.cat(parts)


def find_bias(layer: nn.Linear) -> Tensor:
    bias = cast("Tensor | None", layer.bias)
    return layer.weight.new_zeros(len(layer.weight)) if bias is None else bias


def multiply(kernel: Kernel, inputs: Tensor, panels: Tensor) -> Tensor:
    """inputs [N, in] times a matrix in panels [out / LANES, in, LANES], shared among torch's threads."""
    rows, width = inputs.shape
    count = len(panels)
    # A kernel that is given addresses alone would not notice.
    assert inputs.dtype == panels.dtype == torch.float32
    assert inputs.is_contiguous()
    assert panels.is_contiguous()
    assert panels.shape[1:] == (width, LANES)
    output = inputs.new_empty(rows, count * LANES)
    threads = torch.get_num_threads()
    edges = [count * part // threads * LANES for part in range(threads + 1)]

    def work(first: int, last: int) -> None:
        places = (inputs.data_ptr(), panels.data_ptr(), output.data_ptr())
        kernel(*places, rows, width, count * LANES, first, last)

    shared = [find_pool().submit(work, *edges[part : part + 2]) for part in range(1, threads)]
    work(*edges[:2])
    for future in shared:
        future.result()
    return output


@cache
def find_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="product")


@cache
def load_kernel() -> Kernel | None:
    """`product.c`, compiled for this very machine, or None where that cannot be done."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if not compiler or shutil.which(compiler[0]) is None:
        return None
    with tempfile.TemporaryDirectory(prefix="trialogue-") as folder:
        library = Path(folder) / "product.so"
        source = Path(__file__).with_name("product.c")
        options = ["-O3", "-march=native", f"-DLANES={LANES}", "-shared", "-fPIC"]
        command = [*compiler, *options, "-o", str(library), str(source)]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=60)
            kernel = ctypes.CDLL(str(library)).product
        except (OSError, subprocess.SubprocessError):
            return None
    kernel.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_size_t] * 5
    kernel.restype = None
    inputs, weight = (
        torch.arange(FEW_ROWS * 64.0).sin().view(-1, 64),
        torch.arange(LANES * 192.0).cos().view(-1, 64),
    )
    is_right = torch.allclose(multiply(kernel, inputs, to_panels(weight)), inputs @ weight.T, atol=1e-4)
    return kernel if is_right else None


def to_panels(weight: Tensor) -> Tensor:
    """[out, in] → [out / LANES, in, LANES]"""
    return weight.view(-1, LANES, weight.shape[1]).transpose(1, 2).contiguous()
