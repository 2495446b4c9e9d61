"""Engines: model weights that can be sampled from and updated, behind the interface in `api`.

`TorchEngine` is in `trialogue.engine.torch_engine`; importing this package does not import torch.
"""

from trialogue.engine.api import (
    Capabilities,
    Completion,
    Engine,
    EngineSettings,
    LoraSettings,
    LossFunction,
    OptimParams,
    Outputs,
    Row,
    SamplingParams,
    TokenBatch,
)

__all__ = [
    "Capabilities",
    "Completion",
    "Engine",
    "EngineSettings",
    "LoraSettings",
    "LossFunction",
    "OptimParams",
    "Outputs",
    "Row",
    "SamplingParams",
    "TokenBatch",
]
