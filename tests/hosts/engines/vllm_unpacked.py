"""A vLLM worker on a CPU whose matrices are not packed, so that it can take new ones:
`--worker-extension-cls vllm_unpacked.Unpacked` has this imported before the model is built."""

from __future__ import annotations

import vllm._custom_ops

vllm._custom_ops._supports_onednn = False


class Unpacked:
    """Nothing more than its import."""
