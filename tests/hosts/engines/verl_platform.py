"""A CPU as verl's accelerator, for `VERL_USE_EXTERNAL_MODULES=verl_platform VERL_PLATFORM=cpu`: imported
wherever verl is, before anything asks for a device."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

torch.set_num_threads(1)


class CpuModule:
    """torch.cpu with the few questions verl asks of a device."""

    def get_device_name(self, *_: Any) -> str:
        return "cpu"

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        return 8 << 30, 16 << 30

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name, lambda *_, **__: 0)


def nothing(self: Any, *_: Any, **__: Any) -> None:
    return None


@PlatformRegistry.register(platform="cpu")
class Cpu(PlatformBase):
    device_name = "cpu"
    vendor_name = "generic"
    device_module = CpuModule()
    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = nothing
    cudart = nothing

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        """gloo, already running in a worker: verl would ask for it twice, which torch refuses."""
        if "RANK" in os.environ and not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CPU_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Any:
        yield

    def ray_resource_name(self) -> str:
        return "GPU"  # what verl counts, whatever the platform

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False
