# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Faster operations for a model on a CPU than those of transformers and torch.

The engine uses only this module of `cpu/`. Every part checks itself against torch when it is loaded. It is
absent where it does not fit: without a compiler, or for other kinds of layers, dtypes or widths.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trialogue.engine.cpu.fused import FusedModel, fuse, is_changed, is_hooked, is_near
from trialogue.engine.cpu.kernels import FEW_ROWS, Kernels, find_step_kernels
from trialogue.engine.cpu.layers import find_layer_kernels
from trialogue.engine.cpu.linear import compute_linear, suits_onednn
from trialogue.engine.cpu.logits import CpuLogits
from trialogue.engine.cpu.tree_kernels import Paths, attend_paths, backpropagate_paths, find_tree_kernels
from trialogue.engine.plan import AttentionPlan, LayerShapes, ShapeRecorder

Pass = Callable[[Tensor, Tensor, AttentionPlan], Tensor]
"""(tokens, positions, plan) → hidden states."""


class FastPath:
    """The fast operations for one model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.fused: FusedModel | None = None
        self.learns_fused = False
        self.logits = CpuLogits()
        self._is_unchanged = not any(map(is_changed, cast(nn.Module, model).modules()))

    def replace_forward(self, module: nn.Module) -> None:
        """Let a linear layer use oneDNN in updates, where that is faster."""
        if type(module) is nn.Linear and suits_onednn(module.weight, module.weight):
            cast(Any, module).forward = MethodType(compute_linear, module)

    def fuse(self, compute: Pass) -> None:
        """Use fused layers from now on, if their hidden states are those of `compute`, the model itself."""
        if self._is_unchanged:
            self.fused = fuse(self.model, lambda fused: self._agrees(fused.hidden, compute))
        kernels = find_layer_kernels(torch.float32)
        if self.fused is not None and kernels is not None:
            self.learns_fused = self._agrees(partial(self.fused.learn, kernels=kernels), compute)

    @torch.no_grad()
    def _agrees(self, candidate: Pass, compute: Pass) -> bool:
        """Compare at the first positions and at others up to the last. So many tokens that large matrices are
        not laid out for the comparison."""
        count, head = FEW_ROWS + 1, self.model.get_output_embeddings()
        tokens = torch.arange(count) % len(cast(Tensor, cast(Any, head).weight))
        last = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or count
        for positions in (torch.arange(count), torch.linspace(0, last - 1, count).long()):
            expected = compute(tokens, positions, ShapeRecorder())
            if not is_near(candidate(tokens, positions, ShapeRecorder()), expected, 1e-4):
                return False
        return True

    def find_pass(self, dtype: torch.dtype) -> Pass | None:
        """The fused forward pass for sampling (in inference mode) or for an update. Hooks that were added
        later need transformers' own modules, so then there is none for updates."""
        if self.fused is None:
            return None
        if torch.is_inference_mode_enabled():
            return self.fused.hidden
        if not self.learns_fused or any(map(is_hooked, cast(nn.Module, self.model).modules())):
            return None
        kernels = find_layer_kernels(dtype)
        return None if kernels is None else partial(self.fused.learn, kernels=kernels)

    def forget(self) -> None:
        """Drop the copies of weights that have changed."""
        if self.fused is not None:
            self.fused.forget()

    def find_step_kernels(self, shapes: LayerShapes) -> Kernels | None:
        return find_step_kernels(shapes, is_half=self.fused is not None and self.fused.head.is_half)

    find_tree_kernels = staticmethod(find_tree_kernels)
    to_paths = staticmethod(Paths.make)
    attend_paths = staticmethod(attend_paths)
    backpropagate_paths = staticmethod(backpropagate_paths)


def find_fast_path(model: PreTrainedModel) -> FastPath | None:
    """The fast operations for a model, or None if it is not on a CPU."""
    return FastPath(model) if model.device.type == "cpu" else None
