"""Model text, tool results and foreign files are data; secrets stay in the environment."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from trialogue import Reply, Task
from trialogue.cli.main import main
from trialogue.config import EvalConfig, Limits, RunSettings, Speaker, load_config
from trialogue.digests import list_now
from trialogue.durable import append, write
from trialogue.errors import ConfigError
from trialogue.records import write_records
from trialogue.run import Run, is_listed, read_config, read_trajectories
from trialogue.score.evaluate import evaluate
from trialogue.secrets import redact
from trialogue.talk.find import find_model
from trialogue.talk.scripted import ScriptedModel
from trialogue.world.find import find_domain

PACKAGE = Path(__file__).parents[1] / "trialogue"
CANARY = "canary-51f0-do-not-write-me"
FORBIDDEN = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"}
FORBIDDEN_CALLS = {"torch.load", "os.system", "os.popen", "numpy.load", "np.load", "subprocess.getoutput"}


def find_faults(path: Path) -> list[str]:
    faults: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        where = f"{path.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = (
                [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            )
            faults += [f"{where} imports {name}" for name in names if name.split(".")[0] in FORBIDDEN_MODULES]
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if called in FORBIDDEN or called in FORBIDDEN_CALLS:
            faults.append(f"{where} calls {called}")
        if given.get("shell") == "True" or given.get("trust_remote_code", "False") != "False":
            faults.append(f"{where} calls {called} with {given}")
        safe = "use_safetensors" in given or "gguf_file" in given or given.get(None) == "SAFE"
        if called.endswith("ForCausalLM.from_pretrained") and not safe:
            faults.append(f"{where} loads weights of any format")
    return faults


def test_nothing_foreign_is_run() -> None:
    faults = [fault for path in PACKAGE.rglob("*.py") for fault in find_faults(path)]
    assert faults == []


def test_the_look_for_faults_finds_them(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text(
        "import pickle\nfrom yaml import load\neval('1')\ntorch.load(f)\nrun(x, shell=True)\n"
        "AutoModelForCausalLM.from_pretrained(p)\nA.from_pretrained(p, trust_remote_code=True)\n"
    )
    assert len(find_faults(file)) == 7


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from trialogue.engine.torch_engine import TorchEngine
    from trialogue.errors import EngineError

    (tmp_path / "config.json").write_text(
        json.dumps(
            {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        )
    )
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch hacked'\ntR.")
    with pytest.raises(EngineError, match=r"pytorch_model\.bin: weights are read as safetensors only"):
        TorchEngine.load(tmp_path)


def test_secrets_are_masked_and_keep_their_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", CANARY)
    monkeypatch.setenv("QUOTED_TOKEN", 'with"quote\\and\u00e9')
    monkeypatch.setenv("SHORT_KEY", "abc")
    assert redact(f"a {CANARY} b abc") == f"a {'*' * len(CANARY)} b abc"
    for value in os.environ["SOME_API_KEY"], os.environ["QUOTED_TOKEN"]:
        line = json.dumps({"error": value}) + "\n"
        append(tmp_path / "log", line)
        write(tmp_path / "file", line)
        for name in ("log", "file"):
            text = (tmp_path / name).read_text(encoding="utf-8")
            assert json.dumps(value)[1:-1] not in text
    assert len(redact(CANARY)) == len(CANARY)


async def test_a_key_that_is_quoted_is_in_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent (or a server's error, or a tool) that says the key does not get it into the run."""
    monkeypatch.setenv("OPENAI_API_KEY", CANARY)
    monkeypatch.setattr("sys.argv", ["trialogue", "eval", f"note={CANARY}"])

    class Quoting:
        async def reply(self, turns: object, tools: object) -> Reply:
            raise RuntimeError(f"401: wrong key {CANARY}")

    def agent(task: Task, seed: int) -> ScriptedModel | Quoting:
        return ScriptedModel([f"My key is {CANARY}."]) if seed % 2 else Quoting()

    monkeypatch.setattr(sys.modules[__name__], "own_agent", agent, raising=False)
    settings = [
        f"agent.model={__name__}:own_agent",
        "tasks.count=6",
        "limits.observations=2",
        f"run.directory={tmp_path}",
        "run.name=r",
    ]
    await evaluate(load_config(EvalConfig, None, settings))
    run = tmp_path / "r"
    held = list(read_trajectories(run))
    assert {item.end for item in held} >= {"error"}
    assert is_listed(run)
    for file in run.rglob("*"):
        assert not file.is_file() or CANARY.encode() not in file.read_bytes(), file


def test_nor_is_it_in_what_is_made_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A corpus, what a reviewer accepts, what another trainer's workers record, a drafted scenario."""
    parquet = pytest.importorskip("pyarrow.parquet")
    from trialogue.config import SynthesizeConfig, TrainConfig
    from trialogue.corpus.draft import write_folder
    from trialogue.corpus.review import Verdict, Verdicts, write_reviewed
    from trialogue.corpus.synthesize import decide_again, synthesize
    from trialogue.hosts.conversations import Conversations
    from trialogue.world.simulated import Scenario

    settings = ["synthesize.count=2", "synthesize.validation=0.0", f"run.directory={tmp_path}", "run.name=r"]
    asyncio.run(synthesize(load_config(SynthesizeConfig, None, settings)))
    run = tmp_path / "r"
    held = list(read_trajectories(run))
    text = held[0].to_json().replace("###STOP###", f'My key is \\"{CANARY}\\". ###STOP###')
    # What was recorded before anybody knew that it is a secret, or by a process that was not told.
    file = tmp_path / "told.jsonl"
    for target in (run / "trajectories" / "synthesize.jsonl", file):
        write_records(target, [text])
    list_now(run)
    [item] = read_trajectories(file)
    verdict = Verdict(id=item.id, stage="review", accepted=True)
    Verdicts(run).add(verdict)
    Verdicts(file).add(verdict)
    monkeypatch.setenv("OPENAI_API_KEY", CANARY)
    assert decide_again(run)["accepted"] == 1
    assert write_reviewed(file, [item]) == {"accepted": 1, "rejected": 0}
    Conversations.open(TrainConfig(), str(tmp_path)).record(3, [item])
    write_folder(tmp_path / "drafted", CANARY, Scenario.model_construct(summary="s"), CANARY, "openai:m")
    [row] = parquet.read_table(run / "train.parquet").to_pylist()
    assert CANARY not in str(row)
    assert "*" * len(CANARY) in str(row["messages"])
    made = [
        file for file in tmp_path.rglob("*") if file.is_file() and "trajectories/synthesize" not in str(file)
    ]
    assert {path.suffix for path in made} >= {".jsonl", ".parquet", ".md"}
    assert [path for path in made if path != file and CANARY.encode() in path.read_bytes()] == []
    assert len(list((tmp_path / "trajectories").glob("step-000003.*"))) == 1


def test_a_key_is_in_no_config_dump_ledger_or_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even where somebody has put it into the configuration, or a service sends it back."""
    monkeypatch.setenv("OPENAI_API_KEY", CANARY)
    config = load_config(EvalConfig, None, [f'agent.base_url="https://host/{CANARY}"'])
    run = Run.create(RunSettings(directory=str(tmp_path), name="r"), "eval", "shop", config, 0)
    run.add_prompts({"agent": CANARY})
    run.add_metrics({"note": CANARY})
    run.add_ledger([{"role": "agent", "model": CANARY, "prompt": 1}])
    run.close("finished")
    for name in ("config.json", "ledger.jsonl", "prompts.json", "metrics.jsonl", "run.json"):
        text = (run.path / name).read_text(encoding="utf-8")
        assert CANARY not in text, name
    assert "*" * len(CANARY) in (run.path / "config.json").read_text(encoding="utf-8")
    assert read_config(EvalConfig, run.path).agent.base_url == f"https://host/{'*' * len(CANARY)}"
    for words in (["eval", CANARY], ["eval", "shop", f"seed={CANARY}"], ["report", str(tmp_path / CANARY)]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code
        told = capsys.readouterr()
        assert "*" * len(CANARY) in told.err
        assert CANARY not in told.out + told.err


def test_an_address_with_a_password_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "x" * 20)
    shop = find_domain("shop")
    for address in (f"http://user:{CANARY}@host/v1", f"https://{CANARY}@host"):
        speaker = Speaker(model="openai:m", base_url=address)
        with pytest.raises(ConfigError) as told:
            find_model(speaker, "agent", shop, Limits())
        assert CANARY not in str(told.value)
