# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""All layers of a decode step in one call of C (`c/decode.c`), for fused models.

Between two matmuls a few tokens take less time than Python takes to call the operations. Here there is one
call per step, with the addresses of all weights and of the cache. Threads share the columns of matmuls and
the rows of attention, and wait for each other after each.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trialogue.engine.cores import count_free
from trialogue.engine.cpu.compiled import refuse_unreadable, require, share
from trialogue.engine.cpu.kernels import THREADS, CCache, CRows, DecodeBatch, Kernels

if TYPE_CHECKING:
    from trialogue.engine.cpu.fused import Layer, Norm
    from trialogue.engine.cpu.linear import FusedLinear


class CNorm(ctypes.Structure):
    _fields_ = (("weight", ctypes.c_void_p), ("eps", ctypes.c_double))


class CMatrix(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("panels", "bias")),
        *((name, ctypes.c_size_t) for name in ("width", "outputs")),
    )


class CLayer(ctypes.Structure):
    _fields_ = (
        *((name, CNorm) for name in ("before", "after", "query", "key")),
        *((name, CMatrix) for name in ("projection", "output", "gates", "down")),
        ("cache", CCache),
        ("kernel", ctypes.c_size_t),
        *((name, ctypes.c_void_p) for name in ("taps", "taps_bias", "inputs")),
    )


class CStep(ctypes.Structure):
    _fields_ = (
        ("rows", CRows),
        *((name, ctypes.c_size_t) for name in ("width", "parts")),
        *(
            (name, ctypes.c_void_p)
            for name in ("cosines", "sines", "hidden", "projected", "mixed", "gated", "scratch")
        ),
        ("each", ctypes.c_size_t),
        ("arrived", ctypes.c_void_p),
    )


class Decoder:
    """A model's layers as C structs, with the weights of this moment."""

    def __init__(self, layers: Sequence[Layer], kernels: Kernels) -> None:
        sizes = (ctypes.sizeof(CLayer), ctypes.sizeof(CStep))
        require(sizes == kernels.struct_bytes, "structs of another size")
        self.kernels = kernels
        self.tensors: list[Tensor] = []  # keeps the memory behind the addresses
        self.layers = (CLayer * len(layers))(*map(self._to_struct, layers))
        self.width = self.layers[0].output.outputs
        self.widths = tuple(
            max(getattr(matrix, name) for matrix in matrices)
            for matrices, name in (
                ([matrix for layer in self.layers for matrix in (layer.projection, layer.gates)], "outputs"),
                ([layer.output for layer in self.layers], "width"),
                ([layer.down for layer in self.layers], "width"),
            )
        )

    def _to_struct(self, layer: Layer) -> CLayer:
        struct = CLayer()
        struct.before, struct.after = self.to_norm(layer.before), self.to_norm(layer.after)
        struct.projection = self._to_matrix(layer.mixer.projection)
        struct.output = self._to_matrix(layer.mixer.output)
        struct.gates, struct.down = self._to_matrix(layer.gates), self._to_matrix(layer.down)
        layer.mixer.fill(struct, self)
        return struct

    def to_norm(self, norm: Norm) -> CNorm:
        return CNorm(self.keep(norm.module.weight), norm.eps)

    def _to_matrix(self, linear: FusedLinear) -> CMatrix:
        panels = linear.find_panels(self.kernels)
        self.tensors.append(panels)
        outputs = len(panels) * self.kernels.lanes
        return CMatrix(panels.data_ptr(), self.keep(linear.find_bias()), linear.width, outputs)

    def keep(self, tensor: Tensor | None) -> int | None:
        """The address of a tensor. The decoder keeps the tensor alive."""
        if tensor is None:
            return None
        self.tensors.append(tensor.detach().contiguous())
        refuse_unreadable(self.tensors[-1])
        return self.tensors[-1].data_ptr()

    def advance(self, batch: DecodeBatch, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> None:
        """Replace hidden states [N, width] by those after the last layer, and write to the slots."""
        rows, parts = batch.rows, min(count_free(), THREADS)
        refuse_unreadable(hidden, *rotation)
        require(
            hidden.shape == (len(rows), self.width) and len(rows) <= self.kernels.most_rows, "so many rows"
        )
        addresses: list[int] = []
        for number, layer in enumerate(self.layers):
            if layer.kernel:
                layer.inputs = self._find_inputs(batch, number, layer.kernel)
            else:
                addresses += batch.fill(number, layer.cache)
                angles = (len(rows), 1, layer.cache.width)
                require(rotation[0].shape == rotation[1].shape == angles, "such angles")
        prefixes = (ctypes.c_void_p * len(addresses))(*addresses)
        place = ctypes.addressof(prefixes)
        for layer in self.layers:
            if not layer.kernel:
                layer.cache.prefixes = place
                place += 2 * rows.struct.groups * ctypes.sizeof(ctypes.c_void_p)
        between = [hidden.new_empty(len(rows), width) for width in self.widths]
        arrived = torch.zeros(2, dtype=torch.int32)
        tensors = (*rotation, hidden, *between)
        step = CStep(rows.struct, self.width, parts, *(tensor.data_ptr() for tensor in tensors))
        structs = ctypes.addressof(self.layers), len(self.layers), ctypes.addressof(step)
        step.each = self.kernels.step_scratch(*structs)
        scratch = hidden.new_empty(parts * step.each)
        step.scratch, step.arrived = scratch.data_ptr(), arrived.data_ptr()
        share(lambda part, _, __: self.kernels.advance(*structs, part), parts, parts=parts, meeting=True)

    def _find_inputs(self, batch: DecodeBatch, number: int, kernel: int) -> int:
        inputs, rows = batch.slots.inputs[number], batch.rows
        refuse_unreadable(inputs)
        shape = (rows.slot_count, kernel - 1 + rows.struct.capacity, self.width)
        require(inputs.shape == shape, "such inputs")
        return inputs.data_ptr()


def fits(layers: Sequence[Layer], kernels: Kernels) -> bool:
    """Whether all widths are multiples of the vector."""
    matmuls = [linear for layer in layers for linear in (layer.down, layer.mixer.output)]
    widths = [width for linear in matmuls for width in (linear.width, linear.outputs)]
    return all(width % kernels.lanes == 0 for width in widths)
