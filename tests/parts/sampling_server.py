"""A server with the HTTP interface of vLLM that takes new weights and samples with the torch engine.

It answers what `VllmEngine` asks, over real HTTP, with the weights it was given as files. With `keeps_old` it
says that it took new weights and keeps the old ones.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from trialogue.engine.api import EngineSettings, Row, SamplingParams
from trialogue.engine.torch_engine import TorchEngine


class SamplingServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, model: Path, **settings: Any) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.base, self.settings = model, EngineSettings(device="cpu", **settings)
        self.engines = {"base": TorchEngine(model, self.settings)}
        self.keeps_old = False
        self.asked: list[str] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no news."""

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.asked.append(path)
        match path:
            case "/v1/models":
                return 200, {"data": [{"id": "base"}]}
            case "/collective_rpc":
                if not self.keeps_old:
                    weights = Path(body["kwargs"]["weights_path"])
                    for file in weights.glob("*.safetensors"):
                        shutil.copy(file, self.base / file.name)
                    self.engines["base"] = TorchEngine(self.base, self.settings)
                return 200, None
            case "/v1/load_lora_adapter":
                self.engines[body["lora_name"]] = TorchEngine(body["lora_path"], self.settings)
                return 200, f"Success: LoRA adapter '{body['lora_name']}' added successfully."
            case "/v1/unload_lora_adapter":
                del self.engines[body["lora_name"]]
                return 200, "Success"
            case "/v1/completions" if body["model"] in self.engines:
                with self.lock:  # an engine is used from one event loop at a time
                    choice = asyncio.run(self.complete(self.engines[body["model"]], body))
                return 200, {"choices": [choice]}
            case "/v1/completions":
                return 404, {"error": {"message": f"The model {body['model']} does not exist."}}
            case _:
                return 200, None

    async def complete(self, engine: TorchEngine, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body["prompt"]
        params = SamplingParams(
            max_tokens=body["max_tokens"],
            temperature=body["temperature"],
            top_p=body.get("top_p", 1.0),
            stop_tokens=tuple(body.get("stop_token_ids", ())),
            seed=body.get("seed"),
        )
        [reply] = await engine.sample([prompt], params)
        choice: dict[str, Any] = {
            "token_ids": reply.tokens,
            "logprobs": {"token_logprobs": reply.logprobs},
        }
        if "prompt_logprobs" in body:
            nothing = [0.0] * len(prompt)
            [scores] = await engine.forward([Row(prompt, [0] * len(prompt), nothing, nothing)])
            pairs = zip(prompt[1:], scores[1:], strict=True)
            choice["prompt_logprobs"] = [None, *({str(token): {"logprob": value}} for token, value in pairs)]
        return choice


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: SamplingServer

    def do_GET(self) -> None:
        self.reply({})

    def do_POST(self) -> None:
        self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}"))

    def reply(self, body: dict[str, Any]) -> None:
        status, found = self.server.answer(self.path, body)
        data = (
            found.encode() if isinstance(found, str) else b"" if found is None else json.dumps(found).encode()
        )
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "text/plain" if isinstance(found, str) else "application/json")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass
