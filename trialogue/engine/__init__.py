"""What computes: weights behind a seam of five verbs.

Import `TorchEngine` from `trialogue.engine.torch_engine`: the seam alone stays free of torch.
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
