"""verl's extension of a vLLM worker, on a CPU whose matrices are not packed, so that it can take new ones."""

from __future__ import annotations

import vllm_unpacked  # noqa: F401 - switches packing off, before the model is built
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

Extension = vLLMColocateWorkerExtension
