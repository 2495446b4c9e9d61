# ruff: noqa: E402 - the shim below has to stand before skyrl is imported
"""SkyRL's server on this machine's CPU: tinker_server.py PORT and its own options.

Two things differ from how it is meant to be started. It would start its engine with `uv run`; here it is the
same Python. And on Python 3.11 its types want TypedDict from typing_extensions.
"""

from __future__ import annotations

import sys
import typing

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict

import argparse
import runpy

if __name__ == "__main__" and sys.argv[1] == "engine":
    sys.argv = ["skyrl.tinker.engine", *sys.argv[2:]]
    runpy.run_module("skyrl.tinker.engine", run_name="__main__")
elif __name__ == "__main__":
    import uvicorn
    from skyrl.tinker import api
    from skyrl.tinker.config import EngineConfig, add_model, config_to_argv

    def build_command(parent: list[str], config: EngineConfig) -> list[str]:
        return [sys.executable, __file__, "engine", *config_to_argv(config)]

    api._build_uv_run_cmd_engine = build_command
    parser = argparse.ArgumentParser()
    add_model(parser, EngineConfig)
    given = vars(parser.parse_args(sys.argv[2:]))
    known = {name: value for name, value in given.items() if name in EngineConfig.model_fields}
    api.app.state.engine_config = EngineConfig.model_validate(known)
    uvicorn.run(api.app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
