# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""All layers of a step of a few new tokens in one call of C (`c/decode.c`), for models in few operations.

What is done to a handful of tokens between two products takes less time than it takes Python to ask for it.
Here it is asked for once a step, with addresses of all weights and of what is kept; threads share the
columns of products and the rows of attention, and meet after each.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trialogue.engine.cores import count_free
from trialogue.engine.cpu.compiled import refuse_unreadable, require, share
from trialogue.engine.cpu.kernels import THREADS, Few, Kernels, Memory, Spots

if TYPE_CHECKING:
    from trialogue.engine.cpu.fused import Layer, Norm
    from trialogue.engine.cpu.linear import Joined


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
        *((name, CMatrix) for name in ("into", "back", "halves", "feed")),
        ("kept", Memory),
        ("reach", ctypes.c_size_t),
        *((name, ctypes.c_void_p) for name in ("taps", "taps_bias", "inputs")),
    )


class CStep(ctypes.Structure):
    _fields_ = (
        ("at", Spots),
        *((name, ctypes.c_size_t) for name in ("width", "parts")),
        *(
            (name, ctypes.c_void_p)
            for name in ("cosines", "sines", "hidden", "joined", "mixed", "fed", "scratch")
        ),
        ("each", ctypes.c_size_t),
        ("arrived", ctypes.c_void_p),
    )


class Decoder:
    """A model's layers as C takes them, with weights as they are now."""

    def __init__(self, layers: Sequence[Layer], kernels: Kernels) -> None:
        require((ctypes.sizeof(CLayer), ctypes.sizeof(CStep)) == kernels.told, "layers told otherwise")
        self.kernels = kernels
        self.tensors: list[Tensor] = []  # what addresses lead to
        self.told = (CLayer * len(layers))(*map(self._tell, layers))
        self.width = self.told[0].back.outputs
        self.widths = tuple(
            max(getattr(layer, name) for layer in told)
            for told, name in (
                ([matrix for one in self.told for matrix in (one.into, one.halves)], "outputs"),
                ([one.back for one in self.told], "width"),
                ([one.feed for one in self.told], "width"),
            )
        )

    def _tell(self, layer: Layer) -> CLayer:
        told = CLayer()
        told.before, told.after = self.tell_norm(layer.before), self.tell_norm(layer.after)
        told.into, told.back = self._matrix(layer.mixer.joined), self._matrix(layer.mixer.output)
        told.halves, told.feed = self._matrix(layer.halves), self._matrix(layer.feed)
        layer.mixer.tell(told, self)
        return told

    def tell_norm(self, norm: Norm) -> CNorm:
        return CNorm(self.keep(norm.module.weight), norm.eps)

    def _matrix(self, product: Joined) -> CMatrix:
        panels = product.find_panels(self.kernels)
        self.tensors.append(panels)
        width, outputs = product.width, len(panels) * self.kernels.lanes
        return CMatrix(panels.data_ptr(), self.keep(product.find_bias()), width, outputs)

    def keep(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        self.tensors.append(tensor.detach().contiguous())
        refuse_unreadable(self.tensors[-1])
        return self.tensors[-1].data_ptr()

    def advance(self, few: Few, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> None:
        """Hidden states [N, width], which become those after the last layer; slots get what layers keep."""
        rows, parts = few.rows, min(count_free(), THREADS)
        refuse_unreadable(hidden, *rotation)
        require(hidden.shape == (len(rows), self.width) and len(rows) <= self.kernels.most, "so many rows")
        addresses: list[int] = []
        for number, layer in enumerate(self.told):
            if layer.reach:
                layer.inputs = self._find_inputs(few, number, layer.reach)
            else:
                addresses += few.tell(number, layer.kept)
                require(
                    rotation[0].shape == rotation[1].shape == (len(rows), 1, layer.kept.width), "such angles"
                )
        prefixes = (ctypes.c_void_p * len(addresses))(*addresses)
        place = ctypes.addressof(prefixes)
        for layer in self.told:
            if not layer.reach:
                layer.kept.prefixes = place
                place += 2 * rows.spots.groups * ctypes.sizeof(ctypes.c_void_p)
        between = [hidden.new_empty(len(rows), width) for width in self.widths]
        arrived = torch.zeros(2, dtype=torch.int32)
        tensors = (*rotation, hidden, *between)
        step = CStep(rows.spots, self.width, parts, *(tensor.data_ptr() for tensor in tensors))
        told = ctypes.addressof(self.told), len(self.told), ctypes.addressof(step)
        step.each = self.kernels.room_of_a_part(*told)
        scratch = hidden.new_empty(parts * step.each)
        step.scratch, step.arrived = scratch.data_ptr(), arrived.data_ptr()
        share(lambda part, _, __: self.kernels.advance(*told, part), parts, parts=parts, meeting=True)

    def _find_inputs(self, few: Few, number: int, reach: int) -> int:
        inputs, spots = few.slots.inputs[number], few.rows.spots
        refuse_unreadable(inputs)
        require(inputs.shape == (few.rows.held, reach - 1 + spots.capacity, self.width), "such inputs")
        return inputs.data_ptr()


def fits(layers: Sequence[Layer], kernels: Kernels) -> bool:
    """Whether all widths are whole numbers of vectors."""
    products = [product for layer in layers for product in (layer.feed, layer.mixer.output)]
    widths = [width for product in products for width in (product.width, product.outputs)]
    return all(width % kernels.lanes == 0 for width in widths)
